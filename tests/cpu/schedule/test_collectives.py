"""Collectives over GPUs: what their kernels compute, in how many CTAs, and planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from crossfuse.emulate.cuda import change_argument, drop_call, emulate_ranks
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, WorkloadRefused
from crossfuse.hardware import Device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import ARRIVALS, TURNS, WINDOW_UNIT, KernelImage, starting_early
from crossfuse.lower.ranks import of_one_rank, with_slabs
from crossfuse.schedule.rules.ranks import schedule_collective
from crossfuse.workload import all_gather, all_reduce, all_to_all, reduce_scatter

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
    sch = schedule_collective(func)
    sequential = run_sequential(sch, {"A": given}).outputs["out"]
    assert np.asarray(sequential).tobytes() == summed(given).tobytes()
    report = emulate_ranks(lower(sch).image, {"A": given}, calls=2)
    report.raise_if_wrong()
    assert np.asarray(report.outputs["out"]).tobytes() == summed(given).tobytes()


SIZES = [(2, 2048, "bfloat16"), (2, 520, "float16"), (3, 129, "float32"), (8, 512, "bfloat16")]


@pytest.mark.parametrize(("ranks", "elements", "dtype"), SIZES)
def test_each_rank_gets_its_slice_of_the_sum(ranks: int, elements: int, dtype: str) -> None:
    sch = schedule_collective(reduce_scatter(elements=elements, ranks=ranks, dtype=dtype))
    given = operands(ranks, ranks * elements, dtype)
    due = summed(given)[0].reshape(ranks, elements)
    _is_right(sch, given.reshape(ranks, ranks, elements), due)


@pytest.mark.parametrize(("ranks", "elements", "dtype"), SIZES)
def test_each_rank_gets_all_tensors(ranks: int, elements: int, dtype: str) -> None:
    sch = schedule_collective(all_gather(elements=elements, ranks=ranks, dtype=dtype))
    given = operands(ranks, elements, dtype)
    _is_right(sch, given, np.broadcast_to(given, (ranks, *given.shape)))


@pytest.mark.parametrize(("ranks", "elements", "dtype"), SIZES)
def test_each_rank_gets_a_slice_of_all(ranks: int, elements: int, dtype: str) -> None:
    sch = schedule_collective(all_to_all(elements=elements, ranks=ranks, dtype=dtype))
    given = operands(ranks, ranks * elements, dtype).reshape(ranks, ranks, elements)
    _is_right(sch, given, given.swapaxes(0, 1))


def _is_right(sch: Any, given: np.ndarray, due: np.ndarray) -> None:
    """On LLVM, and in the emulator, also of kernels that start early and in larger slabs."""
    sequential = run_sequential(sch, {"A": given}).outputs["out"]
    assert np.asarray(sequential).tobytes() == due.tobytes()
    early = starting_early(with_slabs(sch.mod["main"], 2 * WINDOW_UNIT))
    for each in (sch, early):
        report = emulate_ranks(lower(each).image, {"A": given}, calls=3)
        report.raise_if_wrong()
        assert np.asarray(report.outputs["out"]).tobytes() == due.tobytes()


def test_ctas_take_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfuse.planner.cost.collectives.MOST_EXCHANGING", 4)
    monkeypatch.setattr("crossfuse.planner.cost.collectives._ENOUGH_CTAS", 3)
    for elements, ctas, threads in ((384, 4, 4), (288, 3, 4), (32 * 7, 4, 1)):
        sch = schedule_collective(all_gather(elements=elements, ranks=2), threads=4)
        (launch,) = lower(sch).image.launches
        assert (launch.grid[0], launch.block[0]) == (ctas, threads)
        given = operands(2, elements, "bfloat16")
        _is_right(sch, given, np.broadcast_to(given, (2, *given.shape)))
        sch = schedule_collective(reduce_scatter(elements=elements // 2, ranks=2), threads=4)
        _is_right(sch, given.reshape(2, 2, -1), summed(given)[0].reshape(2, -1))


def test_more_ctas_than_run_at_once_are_two_kernels() -> None:
    func = all_gather(elements=64 * 1024, ranks=2)
    one, two = (
        lower(schedule_collective(func, threads=256), Device("some GPU", sms=sms)).image
        for sms in (32, 31)
    )
    assert [len(each.launches) for each in (one, two)] == [1, 2]
    # Their counts differ, so that nothing gives them the same memory.
    assert {each.name for each in one.buffers} ^ {each.name for each in two.buffers} == {
        TURNS,
        ARRIVALS,
    }


def test_slabs_of_one_size_share_memory() -> None:
    def rows(image: KernelImage) -> list[int]:
        return [each.shape[1] * 2 for each in image.buffers if each.name.startswith("A_")]

    slab = 5 * WINDOW_UNIT
    for sch in (
        schedule_collective(all_gather(elements=64, ranks=2)),
        schedule_collective(reduce_scatter(elements=1 << 20, ranks=2)),
    ):
        assert rows(lower(with_slabs(sch.mod["main"], slab)).image) == [slab]


@T.prim_func(s_tir=True)
def from_other_ctas(
    A: T.Buffer((2, 8, 4), "float32"),
    S: T.Buffer((2, 8, 4), "float32"),
    out: T.Buffer((2, 8, 4), "float32"),
):
    """A CTA reads what its peer in the other GPU has filled, and another CTA of its own."""
    P = T.sblock_alloc_buffer((2, 8, 4), scope="global.peer")
    for g, t, e in T.grid(2, 8, 4):
        with T.sblock("P"):
            vg, vt, ve = T.axis.remap("SSS", [g, t, e])
            P[vg, vt, ve] = A[vg, vt, ve]
            S[vg, vt, ve] = A[vg, vt, ve] * T.float32(2)
    for g, t, e in T.grid(2, 8, 4):
        with T.sblock("out"):
            vg, vt, ve = T.axis.remap("SSS", [g, t, e])
            out[vg, vt, ve] = P[1 - vg, vt, ve] + S[vg, 7 - vt, ve]


def test_what_goes_from_cta_to_cta_needs_two_kernels() -> None:
    sch = Schedule(from_other_ctas)
    for name in ("P", "out"):
        rank, cta, thread = sch.get_loops(sch.get_sblock(name))
        sch.rank_bind(rank)
        sch.bind(cta, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
    image = lower(sch).image
    assert len(image.launches) == 2
    given = np.arange(64, dtype="float32").reshape(2, 8, 4)
    report = emulate_ranks(image, {"A": given}, calls=3)
    report.raise_if_wrong()
    assert (report.outputs["out"] == given[::-1] + 2 * given[:, ::-1]).all()


def test_ctas_have_the_same_places_in_all_kernels() -> None:
    """Else one could fill what another reads of the call before."""
    slab = 128 * 4096

    def apart(elements: int, threads: int) -> int:
        sch = schedule_collective(all_gather(elements=elements, ranks=2), threads=threads)
        mine = of_one_rank(with_slabs(sch.mod["main"], slab))
        return int(mine.params[-1].ty.strides[1]) * 2

    assert [apart(64, 1), apart(1 << 14, 16), apart(1 << 10, 128)] == [4096] * 3
    with pytest.raises(LoweringRefused) as caught:
        apart(4096, 512)
    assert str(caught.value) == (
        "ranks: slabs of 524288 bytes: found 8192 bytes of a CTA; limit: 2048, of 128 CTAs with "
        "two places each. Instead: share the tensor among more CTAs, or make slabs larger."
    )


def test_only_inputs_are_promised_to_be_alone() -> None:
    """Else nvcc loads slabs in front of the wait for them, through the read-only cache."""
    text = lower(schedule_collective(all_gather(elements=64, ranks=2))).image.cuda
    promised = set(re.findall(r"__restrict__ (\w+)_ptr", text))
    assert promised == {"A", "crossfuse_rank"}


@pytest.mark.parametrize(
    ("kilo", "ctas", "threads"), [(4, 2, 256), (64, 32, 256), (256, 64, 512), (1024, 128, 1024)]
)
def test_all_ctas_run_at_once(kilo: int, ctas: int, threads: int) -> None:
    image = lower(schedule_collective(all_reduce(elements=kilo << 10, ranks=2))).image
    assert [(each.grid[0], each.block[0]) for each in image.launches] == [(ctas, threads)]
    # Peers' memory is loaded 16 bytes at a time.
    assert image.cuda.count("*(uint4*)(A_global_peer_ptr") == 3


EXCHANGE, TURN = "crossfuse_exchange_with_ranks", "crossfuse_turn_of_ranks"
_RELEASE = "st.release.sys.global.u32 [%0]"


def reworded(old: str, new: str) -> Callable[[KernelImage], KernelImage]:
    def fault(image: KernelImage) -> KernelImage:
        assert old in image.cuda
        return replace(image, cuda=image.cuda.replace(old, new))

    return fault


FAULTS: dict[str, Callable[[KernelImage], KernelImage]] = {
    "no exchange": lambda image: drop_call(image, EXCHANGE, 0),
    "a kernel that is not over": lambda image: drop_call(image, "crossfuse_await_kernel_before", 0),
    "one place": reworded("int turn = ", "int turn = 0 * "),
    "the same place in two turns": reworded("int turn = ", "int turn = 2 * "),
    "turns of another rank": lambda image: change_argument(image, TURN, 1, "0"),
    "told as another rank": lambda image: change_argument(image, EXCHANGE, 1, "0"),
    "a rank less is told": lambda image: change_argument(image, EXCHANGE, 2, "1"),
    "told before all have stored": reworded("int turn) {\n  __syncthreads();", "int turn) {"),
    "read before one has waited": reworded(
        "turn + 1);\n  }\n  __syncthreads();", "turn + 1);\n  }"
    ),
    "release within the GPU": reworded(_RELEASE, _RELEASE.replace("sys", "gpu")),
    "no release": reworded(_RELEASE, _RELEASE.replace("release", "relaxed")),
    "acquire within the GPU": reworded("ld.acquire.sys", "ld.acquire.gpu"),
    "no acquire": reworded("ld.acquire.sys", "ld.relaxed.sys"),
    "a turn too early": reworded("row) + peer, turn + 1)", "row) + peer, turn)"),
    "told of this turn before it": reworded('"r"(turn + 1)', '"r"(turn + 2)'),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_faults_are_found(kind: str, fault: str) -> None:
    if kind == "all-reduce":
        sch = schedule_collective(all_reduce(elements=512, ranks=2))
    else:
        sch = schedule_collective(all_gather(elements=512, ranks=2))
    image = lower(starting_early(sch.mod["main"])).image
    given = {"A": operands(2, 512, "bfloat16")}
    reports = (
        emulate_ranks(FAULTS[fault](image), given, calls=4, timeout_s=30, seed=seed)
        for seed in range(4)
    )
    assert not all(each.ok for each in reports)


def test_other_types_are_refused() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        all_reduce(elements=64, ranks=2, dtype="int32")
    assert str(caught.value) == (
        "all-reduce: tensors of GPUs: found element type int32; limit: float16, bfloat16, float32. "
        "Instead: convert the operands."
    )
