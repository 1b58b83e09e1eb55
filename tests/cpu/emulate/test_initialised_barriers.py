"""Barriers in shared memory that a thread uses before it may know that another has set them up."""

from __future__ import annotations

from dataclasses import replace

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
__forceinline__ __device__ unsigned of_peer(unsigned address, unsigned rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__forceinline__ __device__ void push(unsigned to, float a, float b, float c, float d,
                                     unsigned bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(bar) : "memory");
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


#: Each CTA sends the other one four numbers, whose barrier nobody else uses before.
SENT = """
  __shared__ alignas(8) uint64_t full[1];
  __shared__ alignas(16) float inbox[4];
  int rank = blockIdx.x;
  if (threadIdx.x == 0) {
    init(AT(full));
    PUBLISH
    expect(AT(full), 16);
  }
  MEET
  if (threadIdx.x == 32) {
    const float* own = A + rank * 64;
    push(of_peer(AT(inbox), 1 - rank), own[0], own[1], own[2], own[3],
         of_peer(AT(full), 1 - rank));
  }
  if (threadIdx.x == 0) {
    wait_cluster(AT(full), 0);
    for (int i = 0; i < 4; ++i) C[rank * 64 + i] = inbox[i];
  } else if (threadIdx.x > 3) {
    C[rank * 64 + threadIdx.x] = A[rank * 64 + threadIdx.x];
  }
  release(); meet();
"""


def sending(meet: str, publish: str) -> KernelImage:
    body = SENT.replace("MEET", meet).replace("PUBLISH", publish)
    buffers = [(name, (2, 64), "float32") for name in "AC"]
    return image(body, buffers, grid=2, cluster=2, preamble=HELPERS)


@pytest.mark.parametrize(
    ("meet", "publish"), [("release(); meet();", ""), ("say(); meet();", "publish();")]
)
def test_peers_that_only_send_know_of_a_barrier(meet: str, publish: str) -> None:
    sent = clean(sending(meet, publish), ramp(2, 64))["C"]
    np.testing.assert_array_equal(sent[:, :4], ramp(2, 64)[::-1, :4])


def test_peers_that_only_send_may_not_know_of_it() -> None:
    report = emulate(sending("say(); meet();", ""), [ramp(2, 64)], orders=2)
    found = [each for each in report.findings if "nothing orders that" in each.detail]
    assert {each.kind for each in found} == {"mbarrier"}, report.findings
    assert all("push(" in each.second for each in found)


def test_what_a_peer_sends_is_waited_for_before_the_exit() -> None:
    """A cluster barrier tells of what threads have done, and not of what is on its way."""
    right = sending("release(); meet();", "")
    text = right.cuda.replace("    wait_cluster(AT(full), 0);\n", "")
    wrong = replace(right, cuda=text.replace("= inbox[i]", "= A[i]"))
    report = emulate(wrong, [ramp(2, 64)])
    assert "early-exit" in {each.kind for each in report.findings}, report.findings


#: Warp 0 sets a second barrier up and says so at the first one, at which warp 1 waits.
TOLD = """
  __shared__ alignas(8) uint64_t first[1];
  __shared__ alignas(8) uint64_t second[1];
  if (threadIdx.x == 0) init(AT(first));
  __syncthreads();
  if (threadIdx.x == 0) {
    init(AT(second));
    arrive(AT(first));
    wait(AT(second), 0);
  }
  if (threadIdx.x == 32) {
    wait(AT(first), 0);
    arrive(AT(second));
  }
  C[threadIdx.x] = A[threadIdx.x];
"""


def told(body: str) -> KernelImage:
    return image(body, [(name, (64,), "float32") for name in "AC"], preamble=HELPERS)


def test_a_barrier_of_which_another_tells() -> None:
    clean(told(TOLD), ramp(64), orders=4)


def test_a_barrier_of_which_another_tells_too_late() -> None:
    wrong = told(TOLD.replace("    wait(AT(first), 0);\n", "    while (false) {}\n"))
    reports = [emulate(wrong, [ramp(64)], orders=1, seed=seed) for seed in range(4)]
    found = [each for report in reports for each in report.findings if each.kind == "mbarrier"]
    assert any("nothing orders that" in each.detail for each in found), found
