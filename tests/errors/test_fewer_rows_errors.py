"""What has no kernels for fewer rows, by the text of the refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from crossfuse import _tvm as ir
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import ArtefactRefused, LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func
from errors import tile_programs as t

ALONE = "Instead: leave accept_fewer_rows out, and compile for each number of rows."
ROOT = "limit: 'at most' of the root block. Instead: call sch.accept_fewer_rows()."


@T.macro
def add_transposed(C, R, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj] + T.Cast("float32", R[vj, vi]))


@T.macro
def add_first_row(C, R, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj] + T.Cast("float32", R[0, vj]))


@T.macro
def add_row_and_first_row(C, R, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast(
                "float16",
                C[vi, vj] + T.Cast("float32", R[0, vj]) + T.Cast("float32", R[vi, vj]),
            )


@T.macro
def add_row(C, R, E):
    for i, j in T.grid(64, 64):
        with T.sblock("store"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = T.Cast("float16", C[vi, vj] + T.Cast("float32", R[vi, vj]))


def with_operand(last: Any, rows: int = 64) -> Any:
    """A product whose epilogue reads a matrix."""

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((64, 128), "float16"),
        B: T.Buffer((64, 128), "float16"),
        R: T.Buffer((rows, 64), "float16"),
        E: T.Buffer((64, 64), "float16"),
    ):
        P = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        Q = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
        for _b in T.thread_binding(1, thread="blockIdx.x"):
            t.both_steps(A, B, P, Q, C)
            last(C, R, E)

    return func


def with_itself() -> Any:
    """A product of a matrix with its own transpose."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((64, 128), "float16"), E: T.Buffer((64, 64), "float16")):
        P = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        Q = T.sblock_alloc_buffer((64, 128), "float16", scope="shared.dyn")
        C = T.sblock_alloc_buffer((64, 64), "float32", scope="local")
        for _b in T.thread_binding(1, thread="blockIdx.x"):
            t.both_steps(A, A, P, Q, C)
            t.store(C, E)

    return func


def marked(func: Any) -> Any:
    schedule = func if isinstance(func, ir.Schedule) else ir.Schedule(func)
    accept_fewer_rows(schedule)
    return schedule


def annotated(block: str, value: str) -> Any:
    schedule = schedule_tiled_gemm(prim_func(parse("gemm:M=64,N=64,K=64,dtype=bfloat16")))
    schedule.annotate(schedule.get_sblock(block), "crossfuse.rows", value)
    return schedule


def convolution() -> Any:
    spec = parse("conv_chain:batch=1,H=5,W=7,IC=64,OC1=128,OC2=64,k1=3")
    return schedule_tiled_ffn(prim_func(spec), staged=False)


def split_by_threads() -> Any:
    return schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=64")), cluster=2)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "rows of the transpose": (
        lambda: marked(with_operand(add_transposed)),
        "crossfuse.rows: tensor 'R': found a load at [vj, vi] for row vi; limit: 'R[vi, ...]', the "
        f"same row of an operand. {ALONE}",
    ),
    "a row that all need": (
        lambda: marked(with_operand(add_row_and_first_row)),
        "crossfuse.rows: tensor 'R': found rows that several rows of the output need; limit: "
        f"tensors that are read row by row, or as a whole. {ALONE}",
    ),
    "a product with itself": (
        lambda: marked(with_itself()),
        "crossfuse.rows: tensor 'A': found rows that several rows of the output need; limit: "
        f"tensors that are read row by row, or as a whole. {ALONE}",
    ),
    "other numbers of rows": (
        lambda: marked(with_operand(add_row, 96)),
        f"crossfuse.rows: tensor 'R': found shape (96, 64); limit: 64 rows, as of 'A'. {ALONE}",
    ),
    "pixels": (
        lambda: marked(convolution()),
        "tensor 'X': found shape (1, 5, 7, 64); limit: rows of one or two dimensions: pixels of "
        f"images are not counted by one extent. {ALONE}",
    ),
    "another value": (
        lambda: annotated("root", "any"),
        f"crossfuse.rows: block 'root': found 'any'; {ROOT}",
    ),
    "another block": (
        lambda: annotated("out", "at most"),
        f"crossfuse.rows: block 'out': found 'at most'; {ROOT}",
    ),
    "the general lowering": (
        lambda: marked(split_by_threads()),
        "crossfuse.rows: function: found a schedule of the general lowering; limit: kernels of the "
        "Hopper pipeline, which load and store tiles of fewer rows. Instead: schedule it with "
        "stages (rule 'tensor'), or leave accept_fewer_rows out.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, text = CASES[name]
    with pytest.raises(LoweringRefused) as caught:
        lower(make())
    assert text in str(caught.value)


def test_a_row_that_is_read_as_a_whole_has_all_rows() -> None:
    image = lower(marked(with_operand(add_first_row))).image
    assert {each.name for each in image.buffers if each.rows} == {"A", "E"}


def test_a_second_call() -> None:
    schedule = ir.Schedule(with_itself())
    schedule.accept_fewer_rows()
    with pytest.raises(ScheduleRefused) as caught:
        schedule.accept_fewer_rows()
    assert str(caught.value) == (
        "accept_fewer_rows: block 'root': found crossfuse.rows = at most; limit: one call for a "
        "function. Instead: leave the second call out."
    )


@pytest.mark.parametrize(("rows", "others"), [(65, 65), (3, 4), (0, 0)])
def test_arrays_of_other_rows(rows: int, others: int) -> None:
    a, b, r = (np.zeros((n, w), np.float16) for n, w in ((rows, 128), (64, 128), (others, 64)))
    with pytest.raises(ArtefactRefused) as caught:
        run_sequential(marked(with_operand(add_row)), {"A": a, "B": b, "R": r})
    assert str(caught.value) == (
        f"llvm: arrays A, R: found {rows}, {others} rows; limit: as many in all of them, 1 to 64. "
        "Instead: pass arrays of equally many rows."
    )
