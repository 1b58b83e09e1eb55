"""Steps that the tests of the primitives share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm.s_tir import Schedule

from crossfuse.errors import ScheduleRefused

#: Element types of slabs, as refusals list them.
DTYPES = "float16, bfloat16, float32, int32, float8_e4m3fn, float8_e5m2"


def assert_same(scheduled: Any, expected: Any) -> None:
    """Compare two functions, or schedules of one function each, but for the function's name."""
    tvm.ir.assert_structural_equal(_body(scheduled), _body(expected))


def _body(item: Any) -> Any:
    if isinstance(item, Schedule):
        (item,) = item.mod.functions.values()
    return item.without_attr("global_symbol")


def split_reduction(sch: Any, block: Any, rows: int, ranks: Any) -> Any:
    """Order a product's loops: row tiles, the rank of the reduction, its rest, the tile."""
    i, j, k = sch.get_loops(block)
    row_tile, row = sch.split(i, [None, rows])
    rank, rest = sch.split(k, [ranks, None])
    sch.reorder(row_tile, rank, rest, row, j)
    return rank


def cluster_columns(sch: Any, block: Any, rows: int, ranks: Any, part: int = 2) -> dict[str, Any]:
    """Order a consumer's loops for a cluster over its columns.

    Returns
    -------
    dict[str, LoopRV]
        "tile" over rows, "rank" bound to the cluster, "slice" and "part" of the reduction.
    """
    i, j, k = sch.get_loops(block)
    tile, row = sch.split(i, [None, rows])
    rank, column = sch.split(j, [ranks, None])
    step, rest, inner = sch.split(k, [ranks, None, part])
    sch.reorder(tile, rank, step, rest, row, column, inner)
    sch.cluster_bind(rank)
    return {"tile": tile, "rank": rank, "slice": step, "part": rest}


def refusal(sch: Any, call: Callable[[], Any]) -> str:
    """The text of a refusal that recorded and changed nothing."""
    instructions, module = len(sch.trace.insts), sch.mod
    with pytest.raises(ScheduleRefused) as caught:
        call()
    assert len(sch.trace.insts) == instructions
    assert sch.mod.same_as(module) or tvm_ffi.structural_equal(sch.mod, module)
    return str(caught.value)


def loops_of(func: Any, block: str = "C") -> tuple[Any, ...]:
    sch = Schedule(func)
    return sch, *sch.get_loops(sch.get_sblock(block))
