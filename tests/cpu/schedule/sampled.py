"""Schedules whose cluster size and tile are sampled, as a tuner makes them."""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from cpu.schedule.kernels import chain, matmul, mlp, scaled_matmul
from cpu.schedule.steps import cluster_columns, split_reduction

SIZES = (1, 2, 4, 8)
FUNCTIONS = {
    "scatter": matmul,
    "exchange output": matmul,
    "exchange slices": scaled_matmul,
    "exchange chain": chain,
    "ring": mlp,
    "all-gather": mlp,
}
CASES = tuple(FUNCTIONS)


def sampled(case: str) -> Any:
    """Make the schedule with 4 CTAs and tiles of 4 rows, both decisions of the trace."""
    sch = Schedule(FUNCTIONS[case], seed=1)
    ranks = sch.sample_categorical(SIZES, [1 / len(SIZES)] * len(SIZES), decision=2)
    first = sch.get_sblock("H" if FUNCTIONS[case] is mlp else "C")
    row_loop = sch.get_loops(first)[0]
    _, rows = sch.sample_perfect_tile(row_loop, n=2, max_innermost_factor=8, decision=[2, 4])
    if case == "exchange slices":
        _slice(sch, rows, ranks)
    elif case in ("exchange chain", "ring", "all-gather"):
        second = sch.get_sblock("E" if case == "exchange chain" else "Y")
        loops = cluster_columns(sch, second, rows, ranks, part=1)
    if FUNCTIONS[case] is mlp:
        at = loops["slice" if case == "ring" else "rank"]
        sch.dsm_shuffle(first, second, 0, at, ring=case == "ring")
    else:
        rank = split_reduction(sch, first, rows, ranks)
        sch.dsm_reduce(first, rank, scatter=case == "scatter")
    return sch


def _slice(sch: Any, rows: Any, ranks: Any) -> None:
    """Bind parts of the consumer's columns to the cluster."""
    i, j = sch.get_loops(sch.get_sblock("D"))
    tile, row = sch.split(i, [None, rows])
    rank, column = sch.split(j, [ranks, None])
    sch.reorder(tile, rank, row, column)
    sch.cluster_bind(rank)
