"""Steps that the tests of the primitives share."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import Schedule


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
