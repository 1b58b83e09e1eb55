"""Clusters over two and three axes, through LLVM and through the emulated CUDA.

Slabs lie along one axis; the other axes are loops around the exchange, or inside it.
"""

from __future__ import annotations

from typing import Any

import pytest
from tvm.s_tir import Schedule

from cpu.schedule.runs import chain, check, combine, fill, gemm, shuffle, spread
from crossfuse.workload import parse, prim_func


def product(rows: int, columns: int, depth: int) -> Any:
    return prim_func(parse(f"gemm:M={rows},K={depth},N={columns},dtype=float32"))


def tiled(sch: Any, block: Any, cluster: dict[str, int]) -> tuple[Any, Any, list[Any]]:
    """Tiles of 4 x 4, whose rows go over axis z and columns over axis y of the cluster."""
    i, j, *depth = sch.get_loops(block)
    row_tile, z, row = sch.split(i, [None, cluster.get("z", 1), 4])
    column_tile, y, column = sch.split(j, [None, cluster.get("y", 1), 4])
    sch.reorder(row_tile, column_tile, z, y, *depth, row, column)
    sch.bind(row_tile, "blockIdx.y")
    sch.bind(column_tile, "blockIdx.x")
    for axis, loop in (("z", z), ("y", y)):
        if axis in cluster:
            sch.cluster_bind(loop, axis)
    return row, column, depth


def split_k(func: Any, cluster: dict[str, int], *, scatter: bool) -> Any:
    """Split-K over axis x inside tiles over the other axes."""
    sch = Schedule(func)
    block, out = sch.get_sblock("gemm0"), sch.get_sblock("out")
    if not scatter:
        row, column, _ = tiled(sch, out, cluster)
        nest, row = sch.split(row, [cluster["x"], None])
        sch.cluster_bind(nest)
    inner, width, (depth,) = tiled(sch, block, cluster)
    rank, rest = sch.split(depth, [cluster["x"], None])
    sch.reorder(rank, rest, inner, width)
    partial = sch.dsm_reduce(block, rank, scatter=scatter)
    fill(sch, partial, 5)
    if scatter:
        x = spread(sch, sch.get_loops(block)[5])
        sch.set_scope(block, 0, "local")
        sch.reverse_compute_at(out, x, preserve_unit_loops=True)
        sch.decompose_reduction(block, sch.get_loops(block)[-1])
    else:
        combine(sch, block, 5)
        spread(sch, row, column)
    return sch


SHAPES = [
    {"x": 4, "y": 2},
    {"x": 2, "y": 4, "z": 2},
    {"x": 2, "y": 3},
    {"x": 1, "y": 2, "z": 2},
    {"x": 2, "z": 8},
]


@pytest.mark.parametrize("scatter", [True, False])
@pytest.mark.parametrize("cluster", SHAPES, ids=str)
def test_split_k_inside_tiles_of_other_axes(cluster: dict[str, int], scatter: bool) -> None:
    x, y, z = (cluster.get(axis, 1) for axis in "xyz")
    func = product(4 * z, 8 * y, 4 * x)
    check(func, split_k(func, cluster, scatter=scatter), (x, y, z))


@pytest.mark.parametrize("ring", [True, False])
def test_shuffle_over_columns_with_rows_on_another_axis(ring: bool) -> None:
    func = chain(4)
    check(func, shuffle(func, 4, ring=ring, rows_on_y=2), (4, 2, 1))


def test_ranks_of_a_reduction_on_axis_y_alone() -> None:
    func = gemm(4)
    sch = Schedule(func)
    block, out = sch.get_sblock("gemm0"), sch.get_sblock("out")
    i, j, k = sch.get_loops(block)
    rank, rest = sch.split(k, [4, None])
    sch.reorder(rank, rest, i, j)
    partial = sch.dsm_reduce(block, rank, axis="y")
    fill(sch, partial, 1)
    x = spread(sch, sch.get_loops(block)[1])
    sch.set_scope(block, 0, "local")
    sch.reverse_compute_at(out, x, preserve_unit_loops=True)
    sch.decompose_reduction(block, sch.get_loops(block)[-1])
    check(func, sch, (1, 4, 1))
