"""Cluster barriers and distributed shared memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, exchange, exchanged, image, only, ramp, statement
from crossfuse.emulate.cuda import early_exit, emulate, remove_cluster_barrier, wrong_rank
from crossfuse.lower.image import KernelImage

A = ramp(2, 4, 32)
LOAD = "crossfuse_dsm_load_b32"


def kinds(img: KernelImage, *arrays: np.ndarray) -> set[str]:
    return {finding.kind for finding in emulate(img, arrays).findings}


def test_exchange_is_clean() -> None:
    np.testing.assert_array_equal(clean(exchange(), A, orders=3)["C"], exchanged(A))


def test_exchange_without_barrier() -> None:
    wrong = remove_cluster_barrier(exchange(), 0)
    report = emulate(wrong, [A])
    load, store = statement(wrong, LOAD), statement(wrong, "= A[")
    race = only(report, "race")
    assert race.buffer == "shared memory" and race.unit == "byte"
    assert {race.first, race.second} == {load, store}
    assert "no cluster barrier lies between" in race.detail
    not_started = only(report, "peer-not-started")
    assert not_started.first == load and not_started.buffer == "shared memory"
    assert "before any cluster barrier" in not_started.detail


def test_cta_barrier_does_not_order_ctas() -> None:
    right = exchange()
    wrong = replace(
        right,
        cuda=right.cuda.replace(
            "  crossfuse_cluster_sync();\n  float", "  __syncthreads();\n  float"
        ),
    )
    assert wrong.cuda != right.cuda
    assert {"race", "peer-not-started"} <= kinds(wrong, A)


def test_early_exit() -> None:
    wrong = early_exit(exchange())
    report = emulate(wrong, [A])
    finding = only(report, "early-exit")
    assert [each.kind for each in report.findings] == ["early-exit"]
    assert finding.first == statement(wrong, LOAD)
    assert finding.buffer == "shared memory"
    assert "waits at 1 cluster barriers, and needs one after this access" in finding.detail
    np.testing.assert_array_equal(report.outputs["C"], exchanged(A))


@pytest.mark.parametrize("seed", range(4))
def test_early_exit_in_every_order(seed: int) -> None:
    only(emulate(early_exit(exchange()), [A], seed=seed, orders=1), "early-exit")


def test_wrong_rank_reads_another_slab() -> None:
    report = emulate(wrong_rank(exchange(), wrap=True), [A])
    assert report.ok
    weights = np.roll(np.arange(1, 5, dtype="float32"), 1)[None, :, None]
    expected = np.repeat((A * weights).sum(axis=1, keepdims=True), 4, axis=1)
    np.testing.assert_array_equal(report.outputs["C"], expected)
    assert not np.array_equal(report.outputs["C"], exchanged(A))


def test_bad_rank() -> None:
    wrong = wrong_rank(exchange())
    finding = only(emulate(wrong, [A]), "bad-rank")
    assert finding.first == statement(wrong, LOAD)
    assert finding.buffer == "shared memory"
    assert finding.detail == "rank 4 in a cluster of 4 CTAs"


PUSH = """
  extern __shared__ __align__(64) unsigned char pool[];
  int rank = crossfuse_ptx_cluster_rank();
  crossfuse_cluster_sync();
  for (int peer = 0; peer < 2; ++peer) {
    unsigned short bits = __half_as_ushort(A[blockIdx.x * 32 + threadIdx.x]);
    crossfuse_dsm_store_b16(&((half*)pool)[rank * 32 + threadIdx.x], peer, bits);
  }
  crossfuse_cluster_sync();
  C[blockIdx.x * 32 + threadIdx.x] = ((half*)pool)[(1 - rank) * 32 + threadIdx.x];
"""


def push() -> KernelImage:
    buffers = [("A", (2, 32), "float16"), ("C", (2, 32), "float16")]
    include = "#include <cuda_fp16.h>"
    return image(PUSH, buffers, grid=2, block=32, cluster=2, shared=128, preamble=include)


def test_remote_stores_are_clean() -> None:
    """The last barrier orders the pushes before the local reads, and before the exits."""
    a = ramp(2, 32).astype("float16")
    np.testing.assert_array_equal(clean(push(), a)["C"], a[::-1])


def test_remote_store_without_barrier_races_with_the_owner() -> None:
    wrong = remove_cluster_barrier(push(), -1)
    report = emulate(wrong, [ramp(2, 32).astype("float16")])
    race = only(report, "race")
    assert {race.first, race.second} == {
        statement(wrong, "crossfuse_dsm_store_b16"),
        statement(wrong, "= ((half*)pool)"),
    }
    assert only(report, "early-exit").first == statement(wrong, "crossfuse_dsm_store_b16")


def test_two_ranks_that_push_to_one_place_race() -> None:
    wrong = replace(
        push(), cuda=push().cuda.replace("[rank * 32 + threadIdx.x], peer", "[threadIdx.x], 0")
    )
    race = next(
        f for f in emulate(wrong, [ramp(2, 32).astype("float16")]).findings if f.kind == "race"
    )
    assert race.first == race.second == statement(wrong, "crossfuse_dsm_store_b16")


SPLIT = """
  extern __shared__ __align__(64) unsigned char pool[];
  float* tile = (float*)pool;
  tile[threadIdx.x] = A[blockIdx.x * 32 + threadIdx.x];  // before
  crossfuse_ptx_cluster_arrive();
  tile[32 + threadIdx.x] = 1.0f;  // between
  crossfuse_ptx_cluster_wait();
  int peer = 1 - (int)crossfuse_ptx_cluster_rank();
  unsigned bits = crossfuse_dsm_load_b32(&tile[OFFSET + threadIdx.x], peer);
  C[blockIdx.x * 32 + threadIdx.x] = __uint_as_float(bits);
  crossfuse_cluster_sync();
"""


@pytest.mark.parametrize("offset", [0, 32])
def test_split_barrier_orders_what_precedes_the_arrival(offset: int) -> None:
    buffers = [("A", (2, 32), "float32"), ("C", (2, 32), "float32")]
    define = f"#define OFFSET {offset}"
    img = image(SPLIT, buffers, grid=2, block=32, cluster=2, shared=256, preamble=define)
    if offset == 0:
        np.testing.assert_array_equal(clean(img, ramp(2, 32))["C"], ramp(2, 32)[::-1])
        return
    race = only(emulate(img, [ramp(2, 32)]), "race")
    assert statement(img, "// between") in (race.first, race.second)


def test_relaxed_arrival_orders_no_memory() -> None:
    relaxed = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");'
    body = SPLIT.replace("crossfuse_ptx_cluster_arrive();", relaxed)
    buffers = [("A", (2, 32), "float32"), ("C", (2, 32), "float32")]
    img = image(body, buffers, grid=2, block=32, cluster=2, shared=256, preamble="#define OFFSET 0")
    race = only(emulate(img, [ramp(2, 32)]), "race")
    assert statement(img, "// before") in (race.first, race.second)


def test_cta_that_skips_a_cluster_barrier() -> None:
    body = """
  C[blockIdx.x * 32 + threadIdx.x] = A[blockIdx.x * 32 + threadIdx.x];
  if (blockIdx.x != 3) crossfuse_cluster_sync();
"""
    buffers = [("A", (4, 32), "float32"), ("C", (4, 32), "float32")]
    wrong = image(body, buffers, grid=4, block=32, cluster=4)
    report = emulate(wrong, [ramp(4, 32)])
    finding = only(report, "deadlock")
    assert finding.first == statement(wrong, "crossfuse_cluster_sync")
    assert "waits at cluster barrier number 1" in finding.detail
    assert "CTA rank 3 has finished after arriving at 0" in finding.detail
    assert not report.outputs


def test_threads_that_skip_a_cluster_barrier() -> None:
    body = """
  C[blockIdx.x * 64 + threadIdx.x] = A[blockIdx.x * 64 + threadIdx.x];
  if (threadIdx.x < 32) crossfuse_cluster_sync();
"""
    buffers = [("A", (2, 64), "float32"), ("C", (2, 64), "float32")]
    wrong = image(body, buffers, grid=2, cluster=2)
    finding = only(emulate(wrong, [ramp(2, 64)]), "barrier-divergence")
    assert finding.first == statement(wrong, "crossfuse_cluster_sync")


def test_lanes_of_a_warp_at_different_cluster_barriers() -> None:
    body = """
  C[blockIdx.x * 32 + threadIdx.x] = A[blockIdx.x * 32 + threadIdx.x];
  if (threadIdx.x < 16) {
    crossfuse_cluster_sync();  // low
  } else {
    crossfuse_cluster_sync();  // high
  }
"""
    buffers = [("A", (2, 32), "float32"), ("C", (2, 32), "float32")]
    wrong = image(body, buffers, grid=2, block=32, cluster=2)
    finding = only(emulate(wrong, [ramp(2, 32)]), "barrier-divergence")
    assert {finding.first, finding.second} == {
        statement(wrong, "// low"),
        statement(wrong, "// high"),
    }
    assert "different cluster barrier statements" in finding.detail


def test_two_arrivals_without_a_wait() -> None:
    body = """
  crossfuse_ptx_cluster_arrive();
  crossfuse_ptx_cluster_arrive();  // again
  crossfuse_ptx_cluster_wait();
  crossfuse_ptx_cluster_wait();
  C[blockIdx.x * 32 + threadIdx.x] = A[blockIdx.x * 32 + threadIdx.x];
"""
    buffers = [("A", (2, 32), "float32"), ("C", (2, 32), "float32")]
    wrong = image(body, buffers, grid=2, block=32, cluster=2)
    finding = only(emulate(wrong, [ramp(2, 32)]), "barrier-divergence")
    assert finding.first == statement(wrong, "// again")
    assert "arrives twice" in finding.detail


WIDE = """
  extern __shared__ __align__(64) unsigned char pool[];
  *(uint4*)(pool + threadIdx.x * 16) = *(uint4*)(A + (blockIdx.x * 32 + threadIdx.x) * 4);
  crossfuse_cluster_sync();
  int peer = 1 - (int)crossfuse_ptx_cluster_rank();
  uint4 far = crossfuse_dsm_load_b128(pool + threadIdx.x * 16 + SHIFT, peer);
  *(uint4*)(C + (blockIdx.x * 32 + threadIdx.x) * 4) = far;
  crossfuse_cluster_sync();
"""


def wide(shift: int) -> KernelImage:
    buffers = [("A", (2, 128), "float32"), ("C", (2, 128), "float32")]
    define = f"#define SHIFT {shift}"
    return image(WIDE, buffers, grid=2, block=32, cluster=2, shared=512, preamble=define)


def test_wide_remote_loads_are_clean() -> None:
    np.testing.assert_array_equal(clean(wide(0), ramp(2, 128))["C"], ramp(2, 128)[::-1])


def test_misaligned_remote_load() -> None:
    finding = only(emulate(wide(8), [ramp(2, 128)]), "misaligned")
    assert finding.first == statement(wide(8), "crossfuse_dsm_load_b128")
    assert "a remote access of 16 bytes" in finding.detail


def test_remote_load_outside_shared_memory() -> None:
    finding = only(emulate(wide(16), [ramp(2, 128)]), "out-of-bounds")
    assert finding.first == statement(wide(16), "crossfuse_dsm_load_b128")
    assert (finding.buffer, finding.index) == ("shared memory", 512)


def test_cluster_of_sixteen_with_many_threads() -> None:
    body = """
  extern __shared__ __align__(64) unsigned char pool[];
  ((float*)pool)[threadIdx.x] = A[blockIdx.x * 256 + threadIdx.x];
  crossfuse_cluster_sync();
  float sum = 0.0f;
  for (int peer = 0; peer < 16; ++peer) {
    sum += __uint_as_float(crossfuse_dsm_load_b32(&((float*)pool)[255 - threadIdx.x], peer));
  }
  crossfuse_cluster_sync();
  C[blockIdx.x * 256 + threadIdx.x] = sum;
"""
    buffers = [("A", (16, 256), "float32"), ("C", (16, 256), "float32")]
    a = ramp(16, 256)
    outputs = clean(image(body, buffers, grid=16, block=256, cluster=16, shared=1024), a)
    np.testing.assert_array_equal(outputs["C"], np.tile(a.sum(axis=0)[::-1], (16, 1)))


def test_indices_of_a_three_dimensional_cluster() -> None:
    """TVM reads the cluster rank from a special register; the rank counts x first."""
    body = """
  int rank = cluster_rank();
  int linear = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int inside = blockIdx.x % 2 + 2 * (blockIdx.y % 1 + blockIdx.z % 2);
  C[linear] = inside == rank ? rank : -1;
"""
    helper = """
__forceinline__ __device__ unsigned int cluster_rank() {
  unsigned int ctaid;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(ctaid) :);
  return ctaid;
}
"""
    img = image(body, [("C", (4 * 3 * 2,), "int32")], block=1, preamble=helper)
    launch = replace(img.launches[0], grid=(4, 3, 2), cluster=(2, 1, 2))
    ranks = clean(replace(img, launches=(launch,)))["C"].reshape(2, 3, 4)
    np.testing.assert_array_equal(ranks, np.array([[[0, 1, 0, 1]] * 3, [[2, 3, 2, 3]] * 3]))
