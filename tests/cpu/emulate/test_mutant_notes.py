"""What the runtime notes of right kernels: mutants that are no fault are told from others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, LOADS, STORES
from cpu.emulate.kernels import clean, image, ramp
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, TensorMap
from mutation.mutants import mutate
from mutation.outcomes import Outcome, outcomes

pytestmark = pytest.mark.cpu

#: Helpers under the names of generated text, one instruction each.
HELPERS = """
__forceinline__ __device__ void tvm_builtin_ptx_cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__forceinline__ __device__ void tvm_builtin_ptx_cp_async_bulk_wait_group_read_0() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__forceinline__ __device__ void tvm_builtin_ptx_mbarrier_arrive_b64(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory");
}
__forceinline__ __device__ void tvm_builtin_cuda_mbarrier_wait(void* bar, unsigned parity) {
  asm volatile("{ .reg .pred P1; "
               "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1; "
               "@P1 bra THERE; bra AGAIN; THERE: }"
               :: "r"((unsigned)__cvta_generic_to_shared(bar)), "r"(parity) : "memory");
}
"""


def found(
    img: KernelImage, inputs: Sequence[np.ndarray], operation: str, change: str, fragment: str
) -> list[Outcome]:
    """What became of mutants of one kind, of statements with a fragment."""
    names = [each.name for each in img.buffers if not each.output]
    chosen = [
        each.number - 1
        for each in mutate(img).mutants
        if each.operation == operation and each.change == change and fragment in each.statement
    ]
    given = dict(zip(names, inputs, strict=True))
    return [
        outcome
        for number in chosen
        for outcome in outcomes(img, given, every=10**6, first=number, seeds=(0, 1))
    ]


BOX = """
  __shared__ alignas(128) float tile[2 * 32];
  int lane = threadIdx.x;
  tile[lane] = A[lane];
  tile[32 + lane] = A[32 + lane];
  fence_shared();
  __syncthreads();
  if (lane == 0) {
    store_box(&c_map, 0, 0, AT(tile));
    tvm_builtin_ptx_cp_async_bulk_commit_group();
    store_box(&c_map, 0, 1, AT(tile + 32));
    tvm_builtin_ptx_cp_async_bulk_commit_group();
    tvm_builtin_ptx_cp_async_bulk_wait_group_read_0();
  }
  __syncthreads();
  tile[lane] = 0.0f;
  tile[32 + lane] = 0.0f;
"""


def boxes() -> KernelImage:
    """Two rows are stored, and then what they were stored from is overwritten."""
    a, c = (BufferSpec(name, (2, 32), "float32", name == "C") for name in "AC")
    text = (
        f"{BARRIERS}{STORES}{HELPERS}\n"
        'extern "C" __global__ void __launch_bounds__(32) '
        f"k(float* A, const __grid_constant__ CUtensorMap c_map) {{{BOX}}}\n"
    )
    map_ = TensorMap("c_map", "C", (32, 2), (128,), (32, 1), 0)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("A", "c_map"), (map_,))
    return KernelImage("k", text, (a, c), (launch,))


def test_a_commit_that_another_follows_before_the_wait() -> None:
    np.testing.assert_array_equal(clean(boxes(), ramp(2, 32))["C"], ramp(2, 32))
    first, last = found(boxes(), [ramp(2, 32)], "drop", "left out", "commit_group")
    assert first.equivalent == "all that others learn of tells of the same copies and products"
    assert last.named and not last.equivalent


def test_a_wait_without_which_others_learn_of_less() -> None:
    (dropped,) = found(boxes(), [ramp(2, 32)], "drop", "left out", "wait_group")
    assert dropped.named and "async-race" in dropped.kinds


TOLD = """
  __shared__ alignas(8) uint64_t bars[2];
  __shared__ float cell[2];
  if (threadIdx.x == 0) {
    init(AT(bars));
    init(AT(bars + 1));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cell[0] = A[0];
    tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars));
    BETWEEN
    tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars + 1));
  }
  tvm_builtin_cuda_mbarrier_wait(bars, 0);
  float first = cell[0];
  tvm_builtin_cuda_mbarrier_wait(bars + 1, 0);
  C[threadIdx.x] = first + cell[LAST];
"""


def told(between: str = "", last: int = 0) -> KernelImage:
    buffers = [("A", (1,), "float32"), ("C", (64,), "float32")]
    body = TOLD.replace("BETWEEN", between).replace("LAST", str(last))
    return image(body, buffers, preamble=BARRIERS + HELPERS)


def test_an_arrival_that_tells_nothing_new() -> None:
    first, last = found(told(), [ramp(1)], "weaken", "a relaxed arrival", "arrive")
    assert first.named and "race" in first.kinds
    assert "has learned from others all that it tells of" in last.equivalent


def test_an_arrival_behind_another_store_tells_of_it() -> None:
    kernel = told("cell[1] = A[0];", 1)
    _, last = found(kernel, [ramp(1)], "weaken", "a relaxed arrival", "arrive")
    assert last.named and not last.equivalent


def test_a_wait_that_acquires_nothing() -> None:
    """Values are there, and nothing says that the thread sees them."""
    first, last = found(told(), [ramp(1)], "weaken", "a relaxed wait", "wait")
    assert first.named and "race" in first.kinds
    assert not last.named


def test_what_is_done_twice_or_at_the_barrier_beside() -> None:
    twice = found(told(), [ramp(1)], "twice", "done twice", "arrive")
    beside = found(told(), [ramp(1)], "place", "the barrier beside it", "arrive")
    assert all(each.named for each in (*twice, *beside))


PASSED = """
  __shared__ float cells[128];
  cells[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  float other = cells[63 - threadIdx.x];
  __syncthreads();
  cells[OFFSET + threadIdx.x] = other;
  C[threadIdx.x] = cells[OFFSET + threadIdx.x];
"""


@pytest.mark.parametrize("offset, needed", [(0, True), (64, False)])
def test_a_barrier_between_what_different_threads_touch(offset: int, needed: bool) -> None:
    """The second one is needed if what is written then is what others have read before."""
    buffers = [(name, (64,), "float32") for name in "AC"]
    kernel = image(PASSED.replace("OFFSET", str(offset)), buffers)
    first, second = found(kernel, [ramp(64)], "drop", "left out", "__syncthreads")
    assert first.named and second.named == needed
    assert bool(second.equivalent) == (not needed)


LOADED = """
  __shared__ alignas(128) float tile[32];
  __shared__ alignas(8) uint64_t bars[2];
  if (threadIdx.x == 0) {
    init(AT(bars));
    init(AT(bars + 1));
    publish();
    expect(AT(bars), 128);
    tvm_builtin_ptx_cp_async_bulk_load_mbarrier(AT(tile), &a_map, 0, 0, AT(bars));
  }
  __syncthreads();
  tvm_builtin_cuda_mbarrier_wait(bars, 0);
  C[threadIdx.x] = tile[threadIdx.x];
"""


def loads() -> KernelImage:
    a, c = (BufferSpec(name, (1, 32), "float32", name == "C") for name in "AC")
    load = LOADS.replace("load_box", "tvm_builtin_ptx_cp_async_bulk_load_mbarrier")
    load = load.replace("unsigned bar)", "unsigned __mbar)").replace('"r"(bar)', '"r"(__mbar)')
    text = (
        f"{BARRIERS}{load}{HELPERS}\n"
        'extern "C" __global__ void __launch_bounds__(32) '
        f"k(float* C, const __grid_constant__ CUtensorMap a_map) {{{LOADED}}}\n"
    )
    map_ = TensorMap("a_map", "A", (32, 1), (128,), (32, 1), 0)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("C", "a_map"), (map_,))
    return KernelImage("k", text, (a, c), (launch,))


def test_bytes_that_the_barrier_beside_counts() -> None:
    np.testing.assert_array_equal(clean(loads(), ramp(1, 32))["C"], ramp(1, 32))
    change = "the barrier beside it counts the bytes"
    (beside,) = found(loads(), [ramp(1, 32)], "place", change, "load_mbarrier")
    assert beside.named


def test_a_wait_of_one_thread_for_its_warp() -> None:
    change = "left out by all but one thread of a warp"
    (alone,) = found(loads(), [ramp(1, 32)], "part", change, "mbarrier_wait")
    assert alone.named and "async-race" in alone.kinds


AHEAD = """
  __shared__ alignas(8) uint64_t bars[1];
  if (threadIdx.x == 0) init(AT(bars));
  __syncthreads();
  if (threadIdx.x == 0) {
    tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars));
    AGAIN
  }
  tvm_builtin_cuda_mbarrier_wait(bars, 0);
  C[threadIdx.x] = A[threadIdx.x];
"""


def test_a_phase_that_ends_before_who_waits_for_the_last_one_has_looked() -> None:
    """A parity tells a phase from its neighbours, and not from the next but one."""
    buffers = [(name, (64,), "float32") for name in "AC"]
    preamble = BARRIERS + HELPERS
    clean(image(AHEAD.replace("AGAIN", ""), buffers, preamble=preamble), ramp(64))
    again = "tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars));"
    wrong = image(AHEAD.replace("AGAIN", again), buffers, preamble=preamble)
    reports = [emulate(wrong, [ramp(64)], seed=seed, orders=1) for seed in range(4)]
    assert all(not report.ok for report in reports)
    found = [each for report in reports for each in report.findings if each.kind == "mbarrier"]
    assert any("the next one is, too, before it has looked" in each.detail for each in found)


PAIR = """
  __shared__ alignas(8) uint64_t bars[1];
  if (threadIdx.x == 0) init_pair(AT(bars));
  __syncthreads();
  for (int phase = 0; phase < 2 && threadIdx.x % 32 == 0; ++phase) {
    tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars));
    WAIT
  }
  C[threadIdx.x] = A[threadIdx.x];
"""
OF_TWO = """
__forceinline__ __device__ void init_pair(unsigned bar) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(2) : "memory");
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_an_arrival_that_the_phase_before_may_count(seed: int) -> None:
    """Of two that arrive one waits: the other's second arrival may be the first phase's last."""
    buffers = [(name, (64,), "float32") for name in "AC"]
    preamble = BARRIERS + HELPERS + OF_TWO
    wait = "tvm_builtin_cuda_mbarrier_wait(bars, phase);"
    right = image(PAIR.replace("WAIT", wait), buffers, preamble=preamble)
    clean(right, ramp(64))
    wrong = image(PAIR.replace("WAIT", f"if (threadIdx.x) {wait}"), buffers, preamble=preamble)
    report = emulate(wrong, [ramp(64)], seed=seed, orders=3)
    found = [each for each in report.findings if each.kind in ("mbarrier", "deadlock")]
    assert found, report.findings
    told = "nothing says that the phase before is over: it may be counted there"
    if found[0].kind == "mbarrier":
        assert told in found[0].detail or "an arrival too many" in found[0].detail


KNOWN = """
  __shared__ alignas(8) uint64_t bars[1];
  if (threadIdx.x == 0) {
    init(AT(bars));
    tvm_builtin_ptx_mbarrier_arrive_b64(AT(bars));
    tvm_builtin_cuda_mbarrier_wait(bars, 0);
  }
  __syncthreads();
  tvm_builtin_cuda_mbarrier_wait(bars, 0 * 1);
  C[threadIdx.x] = A[threadIdx.x];
"""


def test_a_wait_for_a_phase_that_is_known_to_be_over() -> None:
    """The threads have met one that had waited."""
    buffers = [(name, (64,), "float32") for name in "AC"]
    kernel = image(KNOWN, buffers, preamble=BARRIERS + HELPERS)
    (again,) = found(kernel, [ramp(64)], "drop", "left out", "mbarrier_wait(bars, 0 * 1)")
    assert again.equivalent.startswith("the phase is known to be over already")
