"""All GPUs of a group at the same time: right kernels pass, planted faults are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tvm.s_tir import Schedule

from cpu.schedule.ranks import CASES, all_reduced, bind_nest, operands, scheduled
from crossfuse.emulate.cuda import (
    change_argument,
    drop_call,
    emulate_ranks,
    remove_cluster_barrier,
)
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import ArtefactRefused, CheckFailed
from crossfuse.lower.extract import lower
from crossfuse.lower.image import WINDOW_UNIT, KernelImage
from crossfuse.lower.rank_barriers import meeting
from crossfuse.schedule.rules.ranks import schedule_row_parallel
from crossfuse.workload import row_parallel

AWAIT, ARRIVE = "crossfuse_await_ranks", "crossfuse_arrive_at_ranks"


@cache
def image_of(case: str) -> KernelImage:
    return lower(scheduled(case)).image


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_compute_what_the_function_says(case: str) -> None:
    func, _ = CASES[case]
    values = operands(func)
    report = emulate_ranks(image_of(case), values)
    report.raise_if_wrong()
    for name, expected in run_sequential(func, values).outputs.items():
        found = report.outputs[name]
        # A result without a rank is the same in all GPUs, bit for bit.
        everywhere = np.broadcast_to(expected, found.shape)
        np.testing.assert_allclose(found, everywhere, rtol=1e-4, atol=1e-5)
        if expected.shape != found.shape:
            assert all(each.tobytes() == found[0].tobytes() for each in found)


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_numbers_of_ranks(ranks: int) -> None:
    func = row_parallel(m=4, k=16 * ranks, n=32, ranks=ranks, dtype="float32")
    values = operands(func)
    report = emulate_ranks(lower(schedule_row_parallel(func)).image, values)
    report.raise_if_wrong()
    exact = np.einsum("gik,gkj->ij", *(each.astype("float64") for each in values.values()))
    np.testing.assert_allclose(report.outputs["out"][ranks - 1], exact, rtol=1e-4, atol=1e-5)


def clustered() -> KernelImage:
    """An all-reduce whose partial products are split again, over clusters in each GPU."""
    sch = Schedule(all_reduced)
    block = sch.get_sblock("C")
    partial = sch.rank_reduce(block, sch.get_loops(block)[-2])
    ranks, i, j, k = sch.get_loops(partial)
    row_tile, row = sch.split(i, [None, 8])
    column_tile, column = sch.split(j, [None, 16])
    share, rest = sch.split(k, [4, None])
    sch.reorder(ranks, row_tile, column_tile, share, rest, row, column)
    sch.bind(row_tile, "blockIdx.y")
    sch.bind(column_tile, "blockIdx.x")
    parts = sch.dsm_reduce(partial, share)
    *_, rest, row, column = sch.get_loops(parts)
    chunk, thread = sch.split(sch.fuse(row, column), [None, 32])
    sch.reorder(thread, chunk, rest)
    sch.bind(thread, "threadIdx.x")
    thread = sch.get_loops(partial)[4]
    sch.bind(thread, "threadIdx.x")
    store = sch.cache_write(partial, 0, "local")
    sch.reverse_compute_at(store, thread, preserve_unit_loops=True)
    bind_nest(sch, block)
    return lower(sch).image


def test_clusters_in_each_gpu() -> None:
    image, values = clustered(), operands(all_reduced)
    report = emulate_ranks(image, values)
    report.raise_if_wrong()
    (expected,) = run_sequential(all_reduced, values).outputs.values()
    np.testing.assert_allclose(report.outputs["C"][1], expected, rtol=1e-4, atol=1e-5)
    for faulty in (remove_cluster_barrier(image), drop_call(image, AWAIT, 1)):
        assert not emulate_ranks(faulty, values).ok


def reworded(old: str, new: str) -> Callable[[KernelImage], KernelImage]:
    def fault(image: KernelImage) -> KernelImage:
        assert old in image.cuda
        return replace(image, cuda=image.cuda.replace(old, new))

    return fault


FAULTS: dict[str, tuple[Callable[[KernelImage], KernelImage], str]] = {
    "parts read too early": (lambda image: drop_call(image, AWAIT, 1), "race"),
    "slabs used again too early": (lambda image: drop_call(image, AWAIT, 0), "race"),
    "no arrival behind the parts": (lambda image: drop_call(image, ARRIVE, 0), "race"),
    "no arrival behind the sums": (lambda image: drop_call(image, ARRIVE, 1), "race"),
    "release within the GPU": (reworded("red.release.sys", "red.release.gpu"), "race"),
    "acquire within the GPU": (reworded("ld.acquire.sys", "ld.acquire.gpu"), "race"),
    "no release": (reworded("red.release.sys", "red.relaxed.sys"), "race"),
    "arrival before all threads": (reworded("{\n  __syncthreads();\n  for", "{\n  for"), "race"),
    "all fill one slab": (reworded("crossfuse_rank_ptr[0] * 524288", "0 * 524288"), "race"),
    "arrival as another rank": (lambda image: change_argument(image, ARRIVE, 1, "0"), ""),
    "wait as another rank": (lambda image: change_argument(image, AWAIT, 1, "0", 1), ""),
    "wait for one rank less": (lambda image: change_argument(image, AWAIT, 2, "1", 1), "race"),
}


@pytest.mark.parametrize(
    ("case", "fault"),
    [*(("all-reduce", each) for each in FAULTS), *(("all-gather", each) for each in [*FAULTS][:4])],
)
def test_faults_are_found(case: str, fault: str) -> None:
    plant, kind = FAULTS[fault]
    values = operands(CASES[case][0])
    report = emulate_ranks(plant(image_of(case)), values, timeout_s=30)
    assert not report.ok
    assert not kind or kind in {each.kind for each in report.findings}


def test_findings_name_what_orders_gpus() -> None:
    values = operands(CASES["all-reduce"][0])
    faulty = drop_call(image_of("all-reduce"), AWAIT, 1)
    with pytest.raises(CheckFailed) as caught:
        emulate_ranks(faulty, values).raise_if_wrong()
    assert "no release and acquire of a flag lie between, at the scope of the system" in str(
        caught.value
    )


@pytest.mark.parametrize("dropped", [None, 0, 1, 2])
def test_ranks_meet_in_a_kernel_of_their_own(dropped: int | None) -> None:
    """Kernels between which others wait are ordered, as copies there would be."""
    values = operands(CASES["all-reduce"][0])
    joined = _met(meeting(2, WINDOW_UNIT), [each for each in range(3) if each != dropped])
    report = emulate_ranks(joined, values, timeout_s=30)
    # One at either end of a call is enough.
    assert report.ok == (dropped != 1)
    if report.ok:
        (expected,) = run_sequential(all_reduced, values).outputs.values()
        np.testing.assert_allclose(report.outputs["C"][1], expected, rtol=1e-4, atol=1e-5)


def _met(meet: KernelImage, places: list[int]) -> KernelImage:
    """An all-reduce without waits of its own, with meetings at these places between kernels."""
    plain = image_of("all-reduce")
    for call in (AWAIT, ARRIVE):
        plain = drop_call(drop_call(plain, call, 1), call, 0)
    text = meet.cuda[meet.cuda.index("extern") :]
    launches = []
    for place, kernel in enumerate((*plain.launches, None)):
        launches += [*meet.launches] if place in places else []
        launches += [kernel] if kernel else []
    return replace(plain, cuda=f"{plain.cuda}\n{text}", launches=tuple(launches))


def test_own_arrival_is_counted_before_others_are_awaited() -> None:
    image = meeting(2, WINDOW_UNIT)
    faulty = replace(image, cuda=re.sub(r"__syncthreads\(\);  // the own.*", "", image.cuda))
    joined = _met(faulty, [0, 1, 2])
    values = operands(CASES["all-reduce"][0])
    reports = [emulate_ranks(joined, values, timeout_s=30, seed=seed) for seed in range(4)]
    assert "race" in {each.kind for report in reports for each in report.findings}


def test_image_of_one_gpu() -> None:
    image = image_of("all-reduce")
    alone = replace(image, buffers=tuple(replace(each, ranks=0) for each in image.buffers))
    with pytest.raises(CheckFailed) as caught:
        emulate_ranks(alone, {})
    assert str(caught.value) == (
        "emulate-ranks: main: found no buffer in the memory of several GPUs; limit: the image of a "
        "function over ranks. Instead: call crossfuse.emulate.cuda.emulate for what one GPU "
        "computes alone."
    )


def test_arrays_of_another_shape() -> None:
    values = operands(CASES["all-reduce"][0])
    with pytest.raises(ArtefactRefused) as caught:
        emulate_ranks(image_of("all-reduce"), {**values, "A": values["A"][:1]})
    assert str(caught.value) == (
        "emulate-argument: A: found shape (1, 16, 64); limit: shape (2, 16, 64), a slice for each "
        "rank, or (16, 64), the same for all. Instead: pass the arrays of the function over ranks."
    )


def test_too_many_at_once() -> None:
    values = operands(CASES["all-reduce"][0])
    with pytest.raises(CheckFailed, match="found 264192 threads of 129 calls in 2 GPUs; limit:"):
        emulate_ranks(image_of("all-reduce"), values, calls=129)
