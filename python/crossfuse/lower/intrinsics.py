"""Calls of the device helpers in `device/dsm.cuh`, as TIR expressions."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import device_text
from crossfuse.lower.tree import is_call
from crossfuse.markers import SHARED_SCOPES

BARRIER = "crossfuse_cluster_sync"
#: Unsigned type that carries the bits of an access, by its size in bytes.
WORDS = {
    1: ("b8", "uint8", 1),
    2: ("b16", "uint16", 1),
    4: ("b32", "uint32", 1),
    8: ("b64", "uint32", 2),
    16: ("b128", "uint32", 4),
}


def device_source() -> str:
    """CUDA text of the helpers of clusters."""
    return device_text("dsm.cuh")


def cluster_barrier() -> Any:
    """Statement: all threads of the cluster synchronise.

    It is preceded by markers by which TVM's thread-synchronisation pass sees that this CTA's
    threads synchronise here too; `drop_markers` removes them again.
    """
    marks = [_call("tirx.tvm_storage_sync", scope) for scope in SHARED_SCOPES]
    call = ir.cuda_func_call(BARRIER, source_code=device_source())
    return ir.SeqStmt([ir.Evaluate(each) for each in (*marks, call)])


def _call(name: str, *args: Any) -> Any:
    return ir.tirx.call_intrin("void", name, *args)


def is_barrier(statement: Any) -> bool:
    """Whether a statement is the call made by `cluster_barrier`."""
    return isinstance(statement, ir.Evaluate) and is_helper_call(statement.value, BARRIER)


def is_sync(statement: Any, scopes: tuple[str, ...] = SHARED_SCOPES) -> bool:
    """Whether a statement synchronises the threads of a CTA for memory of the given scopes."""
    value: Any = statement.value if isinstance(statement, ir.Evaluate) else None
    return is_call(value, "tirx.tvm_storage_sync") and str(value.args[0].value) in scopes


def is_helper_call(value: Any, name: str) -> bool:
    """Whether an expression calls the device helper `name`."""
    return is_call(value, "tirx.cuda.func_call") and str(value.args[0].value) == name


def dsm_load(address: Any, rank: Any, dtype: str, lanes: int) -> Any:
    """Load `lanes` elements at `address` of this CTA's slab from the slab of `rank`."""
    suffix, word, words = WORDS[ir.tvm.DataType(dtype).bits // 8 * lanes]
    raw = ir.cuda_func_call(
        f"crossfuse_dsm_load_{suffix}",
        address,
        rank,
        source_code=device_source(),
        return_type=word if words == 1 else f"{word}x{words}",
    )
    return ir.tirx.reinterpret(dtype if lanes == 1 else f"{dtype}x{lanes}", raw)


def dsm_store(address: Any, rank: Any, value: Any, dtype: str, lanes: int) -> Any:
    """Statement: store `value` at `address` of the slab of `rank`."""
    suffix, word, words = WORDS[ir.tvm.DataType(dtype).bits // 8 * lanes]
    raw = ir.tirx.reinterpret(word if words == 1 else f"{word}x{words}", value)
    return ir.Evaluate(
        ir.cuda_func_call(
            f"crossfuse_dsm_store_{suffix}", address, rank, raw, source_code=device_source()
        )
    )
