"""Barriers in shared memory that a thread uses before it may know that another has set them up."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS
from cpu.emulate.kernels import clean, image, ramp, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import KernelImage

pytestmark = pytest.mark.cpu

HELPERS = (
    BARRIERS
    + """
__forceinline__ __device__ void arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory");
}
__forceinline__ __device__ void say() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__forceinline__ __device__ void release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__forceinline__ __device__ void meet() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__forceinline__ __device__ void meet_pair() {
  asm volatile("bar.sync %0, %1;" :: "r"(1), "r"(64) : "memory");
}
"""
)
#: Warp 0 sets a barrier up, of which warp 1 knows; it arrives there, and all go on then.
BODY = """
  __shared__ alignas(8) uint64_t ready[1];
  if (threadIdx.x == 0) {
    init(AT(ready));
    PUBLISH
  }
  MEET
  if (threadIdx.x == 32) arrive(AT(ready));
  wait(AT(ready), 0);
  C[blockIdx.x * 64 + threadIdx.x] = A[blockIdx.x * 64 + threadIdx.x];
"""


def kernel(meet: str, publish: str = "", cluster: int = 1) -> KernelImage:
    body = BODY.replace("MEET", meet).replace("PUBLISH", publish)
    buffers = [(name, (cluster, 64), "float32") for name in "AC"]
    return image(body, buffers, grid=cluster, cluster=cluster, preamble=HELPERS)


KNOWN = {
    "a barrier of the CTA": ("__syncthreads();", ""),
    "a named barrier": ("meet_pair();", ""),
    "a cluster barrier": ("release(); meet();", ""),
    "a relaxed one, behind a fence": ("say(); meet();", "publish();"),
}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_a_barrier_that_is_known(name: str, cluster: int) -> None:
    right = kernel(*KNOWN[name], cluster=cluster)
    np.testing.assert_array_equal(clean(right, ramp(cluster, 64))["C"], ramp(cluster, 64))


UNKNOWN = {
    "nothing between": ("", ""),
    "a fence alone": ("", "publish();"),
    "those of a warp": ("__syncwarp();", ""),
    "a relaxed barrier without a fence": ("say(); meet();", ""),
    "a fence behind the arrival": ("say(); if (threadIdx.x == 0) publish(); meet();", ""),
    "nobody waits": ("say();", "publish();"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_barrier_that_may_not_be_there_yet(name: str) -> None:
    """An arrival before the barrier is there is lost on a GPU; in any order it is found here."""
    wrong = kernel(*UNKNOWN[name])
    report = emulate(wrong, [ramp(1, 64)], orders=4)
    found = [each for each in report.findings if "nothing orders that" in each.detail]
    assert {each.kind for each in found} == {"mbarrier"}, report.findings
    assert {each.first for each in found} == {statement(wrong, "init(AT(ready));")}
    assert all(each.detail.startswith("CTA 0 thread 0 initialises it") for each in found)
