"""`gemm_async` for sm_90a: TIRx's tile primitive as wgmma.

TVM has the primitive for Blackwell alone. This variant makes products of a warpgroup out of it::

    acc = T.alloc_buffer((64, 128), "float32", scope="local", layout=accumulator_layout(128))
    Tx.wg.gemm_async(acc, A[stage, 0:64, :], B[stage, :, :], accum=step > 0)
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(0)

The products run on after the call, which fences the registers that they use: the author commits
them and waits, and reads `acc` by `waited_sums`. Layouts are those of `tile_layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.multiply.gemm_operands import (
    Descriptors,
    Region,
    Registers,
    read_region,
)
from crossfuse.lower.hopper.multiply.hold import hold
from crossfuse.lower.hopper.multiply.instruction import K_BYTES, OPERAND_TYPES, multiply
from crossfuse.lower.hopper.multiply.tile_layouts import ROWS, accumulator_layout
from crossfuse.lower.hopper.plan.operand import item_bytes
from crossfuse.lower.hopper.statements import run
from crossfuse.lower.refusal import refuse

_SCOPES = ("shared", "shared.dyn")
_INSTEAD = "multiply tiles of another form, or write wgmma by T.ptx"


@dataclass(frozen=True)
class _Call:
    """A call that wgmma can do: the sums, both operands, and whether sums are kept."""

    sums: Region
    left: Descriptors | Registers
    right: Descriptors
    accumulates: Any

    @property
    def types(self) -> tuple[str, str]:
        """Element types of the operands."""
        return self.left.region.dtype, self.right.region.dtype

    @property
    def parts(self) -> int:
        """Number of wgmma along the reduction."""
        return self.left.extent * item_bytes(self.types[0]) // K_BYTES


def lower_gemm_async(call: Any, context: Any) -> Any:
    """Make the statements of one call.

    Parameters
    ----------
    call : tvm.tirx.tile_primitive.TilePrimitiveCall
        ``gemm_async(C, A, B, transA, transB, accum)``: ``C (+)= A B^T``, or ``A B`` if B is
        transposed.
    context : tvm.tirx.tile_primitive.DispatchContext
        Which threads execute it, and for what target.

    Returns
    -------
    tvm.tirx.PrimFunc
        What takes its place.

    Raises
    ------
    LoweringRefused
        Naming the operand that wgmma cannot take, with what it can.
    """
    _check_threads(context)
    return _emit(_read(call))


def is_hopper(context: Any) -> tuple[bool, str]:
    """Whether a call is lowered for sm_90a, and what else it is lowered for."""
    arch = str(context.target.attrs.get("arch", ""))
    return arch == "sm_90a", f"architecture {arch or 'unknown'}, expected sm_90a"


def _check_threads(context: Any) -> None:
    """All threads of one warpgroup execute a wgmma."""
    found = {
        str(axis): [ir.constant(each) for each in span] for axis, span in context.intra.items()
    }
    scope = str(context.scope_kind)
    if scope != "warpgroup" or found != {"laneid": [32, 0], "wid_in_wg": [4, 0]}:
        raise refuse(
            "gemm-async",
            "gemm_async",
            found=f"scope {scope} with threads {found}",
            limit="all threads of a warpgroup",
            instead="call it as Tx.wg.gemm_async, outside of conditions on lanes and warps",
        )


def _read(call: Any) -> _Call:
    if len(call.args) != 6:
        raise refuse(
            "gemm-async",
            "gemm_async",
            found="scale factors",
            limit="plain products: Hopper scales no blocks",
            instead="scale the sums",
        )
    regions = [read_region(*each) for each in zip("CAB", call.args[:3], strict=True)]
    sums, left, right = regions
    transposed = [bool(ir.constant(each)) for each in call.args[3:5]]
    _check_types(left, right)
    _check_sums(sums)
    if transposed[0]:
        raise left.refuse(
            "a left operand stored as [k, m]", "[m, k]: the reduction inside", _INSTEAD
        )
    if transposed[1] and item_bytes(right.dtype) != 2:
        raise right.refuse(
            f"a {right.dtype} operand stored as [k, n]", "operands of 8 bits as [n, k]", _INSTEAD
        )
    for each, scopes in ((left, ("local", *_SCOPES)), (right, _SCOPES)):
        if each.scope not in scopes:
            raise each.refuse(f"scope {each.scope}", f"scope {' or '.join(scopes)}", _INSTEAD)
    first = Registers(left) if left.scope == "local" else Descriptors(left)
    made = _Call(sums, first, Descriptors(right, transposed=transposed[1]), call.args[5])
    _check_extents(made)
    return made


def _check_types(left: Region, right: Region) -> None:
    known = left.dtype in OPERAND_TYPES and right.dtype in OPERAND_TYPES
    same = known and item_bytes(left.dtype) == item_bytes(right.dtype)
    if not same or (left.dtype != right.dtype and item_bytes(left.dtype) == 2):
        raise left.refuse(
            f"operands of {left.dtype} and {right.dtype}",
            f"one 16-bit type, or two of 8 bits, of {', '.join(OPERAND_TYPES)}",
            "convert the operands",
        )


def _check_sums(sums: Region) -> None:
    columns = sums.extents[-1]
    whole = sums.extents == sums.shape == (ROWS, columns) and columns % 8 == 0 and columns <= 256
    if sums.scope != "local" or sums.dtype != "float32" or not whole:
        raise sums.refuse(
            f"{list(sums.shape)} of {list(sums.extents)} {sums.dtype} in scope {sums.scope}",
            f"all of [{ROWS}, n] float32 in scope local, n a multiple of 8 up to 256",
            "give each product sums of its own",
        )
    if not sums.has_layout(accumulator_layout(columns)):
        raise sums.refuse(
            f"layout {sums.buffer.layout}",
            "that of accumulator_layout",
            "declare the buffer with "
            "crossfuse.lower.hopper.multiply.tile_layouts.accumulator_layout",
        )


def _check_extents(call: _Call) -> None:
    """Rows, columns and the reduction of all three fit together."""
    left, right = call.left.region, call.right.region
    rows, columns = left.shape[0], right.shape[1 if call.right.transposed else 0]
    depth = call.left.extent
    steps = depth * item_bytes(left.dtype) % K_BYTES == 0
    if (rows, columns) != call.sums.shape or call.right.extent != depth or not steps:
        raise left.refuse(
            f"[{rows}, {depth}] by a right operand of {columns} columns and depth "
            f"{call.right.extent}",
            f"{ROWS} rows by {call.sums.shape[1]} columns, of one depth, a multiple of {K_BYTES} "
            "bytes",
            "name regions that fit together",
        )


def _emit(call: _Call) -> Any:
    """Descriptors, the fence of all registers, the products."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name("gemm_async")
        sums = call.sums.buffer.local()
        left, right = call.left.open(), call.right.open()
        count = call.sums.shape[1] // 2
        hold(sums, count)
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        for part in range(call.parts):
            keep = call.accumulates if part == 0 else 1
            operand = left(part)
            multiply(
                call.types,
                [sums[each] for each in range(count)],
                operand if isinstance(operand, list) else [operand],
                right(part),
                ir.script.Cast("uint32", keep),
                transposed=call.right.transposed,
            )
    return builder.get()


def waited_sums(sums: Any) -> Any:
    """The registers of sums in the order of PTX, once the author has waited for their products.

    Parameters
    ----------
    sums : tvm.tirx.Buffer
        With the layout of `accumulator_layout`.

    Returns
    -------
    tvm.tirx.Buffer
        Of each thread, [columns / 2]. No read of them is moved before this place.
    """
    registers = sums.local()
    hold(registers, int(sums.shape[1]) // 2)
    return registers
