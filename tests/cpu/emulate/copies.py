"""CUDA helpers of kernels that copy by TMA: one instruction each, so that a fault drops one."""

from __future__ import annotations

#: Barriers of one arrival in shared memory, and the addresses that instructions take.
BARRIERS = """
#include <cstdint>
__forceinline__ __device__ void init(unsigned bar) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(1) : "memory");
}
__forceinline__ __device__ void publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__forceinline__ __device__ void expect(unsigned bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :: "r"(bar), "r"(bytes) : "memory");
}
__forceinline__ __device__ void wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred P1; "
               "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1; "
               "@P1 bra THERE; bra AGAIN; THERE: }" :: "r"(bar), "r"(parity) : "memory");
}
__forceinline__ __device__ void wait_cluster(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred P1; "
               "AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P1, [%0], %1; "
               "@P1 bra THERE; bra AGAIN; THERE: }" :: "r"(bar), "r"(parity) : "memory");
}
#define AT(pointer) (unsigned)__cvta_generic_to_shared(pointer)
"""

FENCE = """
__forceinline__ __device__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
"""

LOADS = """
__forceinline__ __device__ void load_box(unsigned to, const void* map, int x, int y, unsigned bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
"""

STORES = (
    FENCE
    + """
__forceinline__ __device__ void store_box(const void* map, int x, int y, unsigned from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}
__forceinline__ __device__ void commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__forceinline__ __device__ void await_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
"""
)
