"""Functions over the GPUs of a group, unscheduled, that tests of ranks start from."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from crossfuse.blocks.scheduled import bindings, binds, is_reduction
from crossfuse.markers import is_rank_bound


@T.prim_func(s_tir=True)
def all_reduced(
    A: T.Buffer((2, 16, 64), "float32"),
    B: T.Buffer((2, 64, 32), "float32"),
    C: T.Buffer((16, 32), "float32"),
):
    """A product whose rows of the right operand lie in two GPUs."""
    for i, j, g, k in T.grid(16, 32, 2, 64):
        with T.sblock("C"):
            vi, vj, vg, vk = T.axis.remap("SSRR", [i, j, g, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vg, vi, vk] * B[vg, vk, vj]


@T.prim_func(s_tir=True)
def reduce_scattered(
    A: T.Buffer((2, 16, 64), "float32"),
    B: T.Buffer((2, 64, 32), "float32"),
    C: T.Buffer((2, 8, 32), "float32"),
):
    """The same, where each GPU keeps half of the rows."""
    for z, i, j, g, k in T.grid(2, 8, 32, 2, 64):
        with T.sblock("C"):
            vz, vi, vj, vg, vk = T.axis.remap("SSSRR", [z, i, j, g, k])
            with T.init():
                C[vz, vi, vj] = T.float32(0)
            C[vz, vi, vj] = C[vz, vi, vj] + A[vg, vz * 8 + vi, vk] * B[vg, vk, vj]


@T.prim_func(s_tir=True)
def gathered(
    X: T.Buffer((2, 8, 64), "float32"),
    W: T.Buffer((2, 64, 32), "float32"),
    Y: T.Buffer((2, 16, 32), "float32"),
):
    """A product with columns of the right operand and rows of the left one in two GPUs."""
    for g, i, j, k in T.grid(2, 16, 32, 64):
        with T.sblock("Y"):
            vg, vi, vj, vk = T.axis.remap("SSSR", [g, i, j, k])
            with T.init():
                Y[vg, vi, vj] = T.float32(0)
            Y[vg, vi, vj] = Y[vg, vi, vj] + X[vi // 8, vi % 8, vk] * W[vg, vk, vj]


@T.prim_func(s_tir=True)
def gathered_sums(
    X: T.Buffer((2, 8, 64), "float32"),
    W: T.Buffer((2, 64, 32), "float32"),
    Y: T.Buffer((2, 16, 32), "float32"),
):
    """The same behind a block that makes the left operand."""
    S = T.sblock_alloc_buffer((2, 8, 64))
    for g, i, k in T.grid(2, 8, 64):
        with T.sblock("S"):
            vg, vi, vk = T.axis.remap("SSS", [g, i, k])
            S[vg, vi, vk] = X[vg, vi, vk] * T.float32(2)
    for g, i, j, k in T.grid(2, 16, 32, 64):
        with T.sblock("Y"):
            vg, vi, vj, vk = T.axis.remap("SSSR", [g, i, j, k])
            with T.init():
                Y[vg, vi, vj] = T.float32(0)
            Y[vg, vi, vj] = Y[vg, vi, vj] + S[vi // 8, vi % 8, vk] * W[vg, vk, vj]


def reduce_all(sch: Any) -> None:
    block = sch.get_sblock("C")
    sch.rank_reduce(block, sch.get_loops(block)[-2])


def reduce_scatter(sch: Any) -> None:
    block = sch.get_sblock("C")
    sch.rank_reduce(block, sch.get_loops(block)[-2], scatter=True)


def gather(sch: Any) -> None:
    block = sch.get_sblock("Y")
    sch.rank_bind(sch.get_loops(block)[0])
    sch.rank_gather(block, 0)


#: By name: a function, what puts it on two GPUs.
CASES = {
    "all-reduce": (all_reduced, reduce_all),
    "reduce-scatter": (reduce_scattered, reduce_scatter),
    "all-gather": (gathered, gather),
    "all-gather of sums": (gathered_sums, gather),
}


def operands(func: Any) -> dict[str, np.ndarray]:
    """Random values of the two operands of a function, by name: [ranks, rows, columns]."""
    generator = np.random.default_rng(0)
    return {
        str(each.name): generator.uniform(-1, 1, [int(n) for n in each.ty.shape]).astype("float32")
        for each in func.params[:2]
    }


def bind_nest(sch: Any, block: Any, threads: int = 16) -> None:
    """Bind elements of the result to CTAs and threads; sums stay serial and innermost."""
    loops = list(sch.get_loops(block))
    ranks = [loops.pop(0)] if is_rank_bound(sch.get(loops[0])) else []
    sums = [each for each in loops if _is_summed(sch, block, each)]
    outputs = [each for each in loops if not any(each is other for other in sums)]
    sch.reorder(*ranks, *outputs, *sums)
    flat = sch.fuse(*outputs) if len(outputs) > 1 else outputs[0]
    cta, thread = sch.split(flat, [None, threads])
    sch.bind(cta, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")


def _is_summed(sch: Any, block: Any, loop: Any) -> bool:
    variable = sch.get(loop).loop_var
    return any(is_reduction(e) for e, value in bindings(sch, block) if binds(variable, value))


def scheduled(case: str, threads: int = 16) -> Any:
    """A case on two GPUs, each nest bound to CTAs and threads."""
    func, distribute = CASES[case]
    sch = Schedule(func)
    distribute(sch)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        bind_nest(sch, block, threads=threads)
    return sch
