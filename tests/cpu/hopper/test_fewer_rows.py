"""Kernels on fewer rows than they were compiled for, by both checkers; faults planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.lower.image import ROW_COUNT, KernelImage
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import WorkloadSpec, check, parse, prim_func, random_inputs

FURTHER = "scale=last,bias=last,residual=out"
CHAIN = "gemm_chain:M={M},K=72,N=256,L=80,dtype=bfloat16,act=gelu"
GATED = "gated_ffn:M={M},K=64,N=256,L=64,dtype=bfloat16"
BOTH = "scale=first+last,bias=first+last,residual=out"


def product(text: str, **tiles: Any) -> tuple[str, Callable[[Any], Any]]:
    return f"gemm:M={{M}},{text}", lambda f: schedule_tiled_gemm(f, tiles=TensorTiles(**tiles))


def ffn(text: str, **options: Any) -> tuple[str, Callable[[Any], Any]]:
    return text, lambda f: schedule_tiled_ffn(f, **options)


def clustered(text: str, *tiles: int, **options: Any) -> tuple[str, Callable[[Any], Any]]:
    return text, lambda f: schedule_clustered_ffn(f, tiles=ClusterTiles(*tiles), **options)


def kept(text: str, *tiles: int, **options: Any) -> tuple[str, Callable[[Any], Any]]:
    return text, lambda f: schedule_register_ffn(f, tiles=RegisterTiles(*tiles), **options)


#: Rows of the function; workload and rule.
CASES: dict[str, tuple[int, tuple[str, Callable[[Any], Any]]]] = {
    "product": (128, product("N=64,K=64,dtype=bfloat16,weights=nk")),
    "product, residual": (128, product(f"N=72,K=72,dtype=float16,weights=nk,{FURTHER}")),
    "product, odd width": (
        100,
        product("N=37,K=72,dtype=bfloat16,weights=nk,residual=in,bias=last"),
    ),
    "product, float32": (128, product(f"N=40,K=64,dtype=bfloat16,out=float32,{FURTHER}")),
    "product, 192 rows": (192, product("N=64,K=64,dtype=bfloat16,weights=nk", rows=192, cluster=1)),
    "split": (128, product(f"N=64,K=256,dtype=bfloat16,weights=nk,{FURTHER}", split=2)),
    "split, rows of warps": (
        64,
        product("N=64,K=256,dtype=bfloat16,weights=nk", split=2, columns=64),
    ),
    "L2": (128, ffn(GATED)),
    "L2, boxes": (128, ffn(GATED, first=TensorTiles(columns=32, cluster=1))),
    "two kernels, boxes": (
        128,
        ffn(GATED, first=TensorTiles(columns=32, cluster=1), staged=False),
    ),
    "L2, epilogues": (70, ffn(f"{CHAIN},{BOTH}")),
    "L2, 256 rows": (
        256,
        ffn(
            "gated_ffn:M={M},K=64,N=192,L=64,dtype=bfloat16,residual=out",
            first=TensorTiles(rows=256, columns=48, cluster=1),
            second=TensorTiles(rows=256, columns=32),
        ),
    ),
    "two kernels": (128, ffn(GATED, staged=False, constant_weights=True)),
    "two kernels, epilogues": (70, ffn(f"{CHAIN},{BOTH}", staged=False)),
    "cluster": (128, clustered(f"{CHAIN},{BOTH}", 64, 2, 1)),
    "cluster, 100 rows": (100, clustered(GATED, 64, 2, 1)),
    "cluster, parts": (128, clustered(f"{GATED},{FURTHER}", 128, 2, 2)),
    "registers": (
        128,
        kept(f"gemm_chain:M={{M}},K=64,N=128,L=64,dtype=bfloat16,{BOTH}", 64, 64, 1),
    ),
    "registers, parts": (
        128,
        kept(f"gemm_chain:M={{M}},K=64,N=256,L=64,dtype=bfloat16,act=relu,{BOTH}", 64, 64, 2),
    ),
    "registers, cluster": (
        128,
        kept("gated_ffn:M={M},K=64,N=256,L=64,dtype=bfloat16,residual=out", 128, 64, 2, 2),
    ),
}


def spec_of(name: str, rows: int | None = None) -> WorkloadSpec:
    most, (text, _) = CASES[name]
    return parse(text.format(M=rows or most))


@cache
def scheduled(name: str) -> Any:
    schedule = CASES[name][1][1](prim_func(spec_of(name)))
    accept_fewer_rows(schedule)
    return schedule


@cache
def right(name: str) -> KernelImage:
    return lower(scheduled(name)).image


def rows_of(name: str) -> list[int]:
    """Numbers of rows at ends of tiles, the last one that of a whole call."""
    most = CASES[name][0]
    return sorted({each for each in (1, 63, 64, 65, most - 1, most) if each <= most})


def first_rows(name: str, inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    by_row = {each.name for each in right(name).buffers if each.rows}
    return {key: value[:rows] if key in by_row else value for key, value in inputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_all(name: str) -> None:
    """Each number of rows is clean and right, and has the bits of a call with all rows."""
    image = right(name)
    inputs = dict(random_inputs(spec_of(name)))
    whole = emulate(image, inputs, orders=1)
    whole.raise_if_wrong()
    check(spec_of(name), inputs, whole.outputs["out"])
    for rows in rows_of(name)[:-1]:
        fewer = first_rows(name, inputs, rows)
        report = emulate(image, fewer, orders=2 if rows == 65 else 1)
        report.raise_if_wrong()
        found = report.outputs["out"]
        check(spec_of(name, rows), fewer, found)
        assert found.tobytes() == whole.outputs["out"][:rows].tobytes(), rows


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_others(name: str) -> None:
    """The schedule on LLVM, with NaNs in the place of the other rows."""
    for rows in (1, 65 if CASES[name][0] > 65 else 33):
        inputs = first_rows(name, dict(random_inputs(spec_of(name))), rows)
        report = run_sequential(scheduled(name), inputs)
        report.raise_if_wrong()
        check(spec_of(name, rows), inputs, report.outputs["out"])


@pytest.mark.parametrize("name", ["product", "L2, boxes", "two kernels, boxes"])
def test_kernels_that_tma_alone_stores_are_those_of_all_rows(name: str) -> None:
    """What the mark changes is the host's: descriptors end with the rows."""
    fixed = lower(CASES[name][1][1](prim_func(spec_of(name)))).image
    assert fixed.rows is None
    assert right(name).rows == CASES[name][0]
    assert right(name).cuda == fixed.cuda


@pytest.mark.parametrize("name", CASES)
def test_the_mark_is_replayed(name: str) -> None:
    from crossfuse import _tvm as ir

    again = ir.Schedule(prim_func(spec_of(name)))
    scheduled(name).trace.apply_to_schedule(again, remove_postproc=False)
    assert lower(again).image == right(name)


def test_which_buffers_have_rows() -> None:
    by_row = {each.name for each in right("cluster").buffers if each.rows}
    assert by_row == {"A", "residual", "out"}
    image = right("two kernels, boxes")
    assert {each.name for each in image.buffers if each.rows} == {"A", "out"}
    cut = image.with_rows(5)
    extents = {m.buffer: m.extents[1] for each in cut.launches for m in each.tensor_maps}
    assert {extents[each] for each in ("A", "out")} == {5}
    # What passes from one kernel to the next has all rows.
    assert [each.shape[0] for each in cut.workspaces] == [128]
    assert {extents[each.name] for each in cut.workspaces} == {128}


def uncut(name: str, buffer: str, rows: int) -> KernelImage:
    """Descriptors of a buffer have all rows, of which the buffer has fewer."""
    image = right(name)
    whole = {each.name: each for launch in image.launches for each in launch.tensor_maps}
    cut = image.with_rows(rows)
    launches = tuple(
        replace(
            launch,
            tensor_maps=tuple(
                whole[each.name] if each.buffer == buffer else each for each in launch.tensor_maps
            ),
        )
        for launch in cut.launches
    )
    return replace(cut, launches=launches)


@pytest.mark.parametrize("buffer", ["A", "out"])
@pytest.mark.parametrize(
    "name", ["product", "product, 192 rows", "L2, boxes", "two kernels, boxes"]
)
def test_descriptors_that_reach_beyond_the_rows_are_caught(name: str, buffer: str) -> None:
    inputs = first_rows(name, dict(random_inputs(spec_of(name))), 65)
    report = emulate(uncut(name, buffer, 65), inputs)
    assert ("out-of-bounds", buffer) in {(each.kind, each.buffer) for each in report.findings}


def with_count(name: str, by: str) -> KernelImage:
    """Kernels that take another number for that of the rows."""
    image = right(name)
    body = image.cuda.index("{", image.cuda.rindex("__global__"))
    assert ROW_COUNT in image.cuda[body:]
    return replace(image, cuda=image.cuda[:body] + image.cuda[body:].replace(ROW_COUNT, by))


@pytest.mark.parametrize(
    "name", ["product, odd width", "product, float32", "split", "cluster", "registers, parts"]
)
def test_accesses_beyond_the_rows_are_caught(name: str) -> None:
    """With all rows in the place of their number, memory behind the last one is accessed."""
    inputs = first_rows(name, dict(random_inputs(spec_of(name))), 33)
    image = with_count(name, str(CASES[name][0]))
    report = emulate(image, inputs, orders=1, max_findings=32)
    found = {each.buffer for each in report.findings if each.kind == "out-of-bounds"}
    plain = {each.name for each in image.buffers if each.rows} & set(image.launches[-1].arguments)
    assert plain
    assert found == plain


def test_a_row_that_is_not_stored_is_caught() -> None:
    name = "product, float32"
    inputs = first_rows(name, dict(random_inputs(spec_of(name))), 33)
    report = emulate(with_count(name, f"({ROW_COUNT} - 1)"), inputs)
    assert {(each.kind, each.buffer) for each in report.findings} == {("unwritten-output", "out")}
