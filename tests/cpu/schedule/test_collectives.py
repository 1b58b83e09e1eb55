"""Collectives over GPUs: what their kernels compute, in how many CTAs, and planted faults."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossfuse.emulate.cuda import drop_call, emulate_ranks
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import WorkloadRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import WINDOW_UNIT, KernelImage, starting_early
from crossfuse.lower.ranks import with_slabs
from crossfuse.schedule.rules.ranks import (
    schedule_all_gather,
    schedule_all_reduce,
    schedule_reduce_scatter,
)
from crossfuse.workload import all_gather, all_reduce, reduce_scatter

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def operands(ranks: int, elements: int, dtype: str) -> np.ndarray:
    """Some values cancel but for the last bits."""
    made = np.random.default_rng(0).uniform(-1, 1, (ranks, elements)).astype(TYPES[dtype])
    made[-1, ::7] = -made[0, ::7]
    return made


def summed(given: np.ndarray) -> np.ndarray:
    """Float32 sums in the order of ranks, rounded once."""
    total = np.zeros(given.shape[1:], "float32")
    for each in given:
        total = total + each.astype("float32")
    return np.broadcast_to(total.astype(given.dtype), given.shape)


@pytest.mark.parametrize(
    ("ranks", "elements", "dtype"),
    [(2, 2048, "bfloat16"), (2, 520, "float16"), (3, 129, "float32"), (8, 1024, "bfloat16")],
)
def test_all_ranks_get_the_same_sum(ranks: int, elements: int, dtype: str) -> None:
    func = all_reduce(elements=elements, ranks=ranks, dtype=dtype)
    given = operands(ranks, elements, dtype)
    sch = schedule_all_reduce(func)
    sequential = run_sequential(sch, {"A": given}).outputs["out"]
    assert np.asarray(sequential).tobytes() == summed(given).tobytes()
    report = emulate_ranks(lower(sch).image, {"A": given}, calls=2)
    report.raise_if_wrong()
    assert np.asarray(report.outputs["out"]).tobytes() == summed(given).tobytes()


SIZES = [(2, 2048, "bfloat16"), (2, 520, "float16"), (3, 129, "float32"), (8, 512, "bfloat16")]


@pytest.mark.parametrize(("ranks", "elements", "dtype"), SIZES)
def test_each_rank_gets_its_slice_of_the_sum(ranks: int, elements: int, dtype: str) -> None:
    sch = schedule_reduce_scatter(reduce_scatter(elements=elements, ranks=ranks, dtype=dtype))
    given = operands(ranks, ranks * elements, dtype)
    due = summed(given)[0].reshape(ranks, elements)
    _is_right(sch, given.reshape(ranks, ranks, elements), due)


@pytest.mark.parametrize(("ranks", "elements", "dtype"), SIZES)
def test_each_rank_gets_all_tensors(ranks: int, elements: int, dtype: str) -> None:
    sch = schedule_all_gather(all_gather(elements=elements, ranks=ranks, dtype=dtype))
    given = operands(ranks, elements, dtype)
    _is_right(sch, given, np.broadcast_to(given, (ranks, *given.shape)))


def _is_right(sch: Any, given: np.ndarray, due: np.ndarray) -> None:
    """On LLVM, and in the emulator, also of kernels that start early and in larger slabs."""
    sequential = run_sequential(sch, {"A": given}).outputs["out"]
    assert np.asarray(sequential).tobytes() == due.tobytes()
    early = starting_early(with_slabs(sch.mod["main"], 2 * WINDOW_UNIT))
    for each in (sch, early):
        report = emulate_ranks(lower(each).image, {"A": given}, calls=2)
        report.raise_if_wrong()
        assert np.asarray(report.outputs["out"]).tobytes() == due.tobytes()


def test_ctas_take_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfuse.planner.cost.collectives._MOST_CTAS", 4)
    monkeypatch.setattr("crossfuse.planner.cost.collectives._FEWEST_CTAS", 3)
    for ctas, kept in ((12, 4), (9, 3), (7, 7)):
        elements = 8 * 4 * ctas
        sch = schedule_all_gather(all_gather(elements=elements, ranks=2), threads=4)
        assert [each.grid[0] for each in lower(sch).image.launches] == [kept, kept]
        given = operands(2, elements, "bfloat16")
        _is_right(sch, given, np.broadcast_to(given, (2, *given.shape)))


def test_slabs_of_one_size_share_memory() -> None:
    def rows(image: KernelImage) -> list[int]:
        return [each.shape[1] * 2 for each in image.buffers if each.name.startswith("A_")]

    slab = 3 * WINDOW_UNIT
    for sch in (
        schedule_all_gather(all_gather(elements=64, ranks=2)),
        schedule_reduce_scatter(reduce_scatter(elements=1 << 20, ranks=2)),
    ):
        assert rows(lower(with_slabs(sch.mod["main"], slab)).image) == [slab]


def test_only_inputs_are_promised_to_be_alone() -> None:
    """Else nvcc loads slabs in front of the wait for them, through the read-only cache."""
    text = lower(schedule_all_gather(all_gather(elements=64, ranks=2))).image.cuda
    promised = set(re.findall(r"__restrict__ (\w+)_ptr", text))
    assert promised == {"A", "crossfuse_rank"}


@pytest.mark.parametrize(
    ("kilo", "ctas", "threads"), [(4, 2, 256), (64, 16, 512), (256, 64, 512), (1024, 128, 1024)]
)
def test_few_ctas_are_counted(kilo: int, ctas: int, threads: int) -> None:
    image = lower(schedule_all_reduce(all_reduce(elements=kilo << 10, ranks=2))).image
    assert [(each.grid[0], each.block[0]) for each in image.launches] == [(ctas, threads)] * 2
    # Peers' memory is loaded 16 bytes at a time.
    assert image.cuda.count("*(uint4*)(A_global_peer_ptr") == 3


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ("await_ranks", 0),
        ("await_ranks", 1),
        ("arrive_at_ranks", 0),
        ("await_kernel_before", 0),
        ("await_kernel_before", 1),
    ],
)
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_faults_are_found(kind: str, call: str, kernel: int) -> None:
    if kind == "all-reduce":
        sch = schedule_all_reduce(all_reduce(elements=512, ranks=2))
    else:
        sch = schedule_all_gather(all_gather(elements=512, ranks=2))
    image = lower(starting_early(sch.mod["main"])).image
    faulty = drop_call(image, f"crossfuse_{call}", kernel)
    report = emulate_ranks(faulty, {"A": operands(2, 512, "bfloat16")}, calls=2, timeout_s=30)
    assert "race" in {each.kind for each in report.findings}


def test_other_types_are_refused() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        all_reduce(elements=64, ranks=2, dtype="int32")
    assert str(caught.value) == (
        "all-reduce: tensors of GPUs: found element type int32; limit: float16, bfloat16, float32. "
        "Instead: convert the operands."
    )
