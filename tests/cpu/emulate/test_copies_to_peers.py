"""Bulk copies into the shared memory of a peer, over what its threads have loaded."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, FENCE
from cpu.emulate.kernels import clean, image, only, ramp, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import KernelImage

pytestmark = pytest.mark.cpu

HELPERS = (
    BARRIERS
    + FENCE
    + """
__forceinline__ __device__ unsigned of_peer(unsigned address, unsigned rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__forceinline__ __device__ void pass(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
__forceinline__ __device__ void put(unsigned address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
               :: "r"(address), "f"(first), "f"(second) : "memory");
}
"""
)
FENCED = """
  __shared__ alignas(128) float inbox[32];
  __shared__ alignas(128) float outbox[32];
  __shared__ alignas(8) uint64_t full[1];
  int lane = threadIdx.x, rank = blockIdx.x;
  if (lane == 0) {
    init(AT(full));
    publish();
  }
  inbox[lane] = 1.0f;
  const float* own = A + rank * 32 + lane / 2 * 2;
  if (lane % 2 == 0) put(AT(&outbox[lane]), own[0], own[1]);
  fence_shared();
  __syncthreads();
  if (lane == 0) expect(AT(full), 128);
  crossfuse_cluster_sync();
  float before = inbox[31 - lane];
  fence_shared();  // of the load
  crossfuse_cluster_sync();
  if (lane == 0) pass(of_peer(AT(inbox), 1 - rank), AT(outbox), 128, of_peer(AT(full), 1 - rank));
  wait_cluster(AT(full), 0);
  C[rank * 32 + lane] = before + inbox[lane];
  crossfuse_cluster_sync();
"""
BUFFERS = [("A", (2, 32), "float32"), ("C", (2, 32), "float32")]


def passing(body: str) -> KernelImage:
    """Two CTAs, each of which fills what the other one has loaded."""
    return image(body, BUFFERS, grid=2, block=32, cluster=2, preamble=HELPERS)


def test_a_fence_lies_between() -> None:
    a = ramp(2, 32)
    np.testing.assert_array_equal(clean(passing(FENCED), a)["C"], 1 + a[::-1])


FAULTS = {
    "a wait of too narrow a scope": (
        ("wait_cluster(AT(full), 0);", "wait(AT(full), 0);"),
        "async-race",
        "not with a scope that includes who sent it",
    ),
    "nobody waits": (("wait_cluster(AT(full), 0);", ""), "async-race", ""),
    "a peer that has not met the others since its load": (
        ("  crossfuse_cluster_sync();\n  if (lane == 0) pass", "  if (lane == 0) pass"),
        "async-race",
        "nothing orders that before it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    (right, wrong), kind, detail = FAULTS[name]
    assert right in FENCED
    report = emulate(passing(FENCED.replace(right, wrong)), [ramp(2, 32)], orders=1)
    found = [str(each) for each in report.findings if each.kind == kind]
    assert any(detail in each for each in found), report.findings


def test_no_fence_lies_between() -> None:
    wrong = passing(FENCED.replace("fence_shared();  // of the load", ""))
    found = only(emulate(wrong, [ramp(2, 32)], orders=1), "async-race")
    assert statement(wrong, "float before") in str(found)
    assert statement(wrong, "pass(") in str(found)
    assert "by an ordinary load that no fence.proxy.async follows" in str(found)
