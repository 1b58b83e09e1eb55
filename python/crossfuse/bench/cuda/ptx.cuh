// Instructions of Hopper that C++ does not spell (PTX ISA 8.0 and later), and waits that end.
#pragma once
#include <cstdint>

#include "harness.h"

namespace ptx {

// A wait gives up after two seconds of cycles, far beyond anything that is measured.
constexpr long long kPatience = 4'000'000'000ll;

__device__ __forceinline__ void give_up(unsigned code) {
  *harness::device_fault_word = code;
  __threadfence_system();
  __trap();
}

__device__ __forceinline__ uint32_t shared(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t rank() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return value;
}

// Address of the same place in the CTA of a rank.
__device__ __forceinline__ uint32_t peer(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The same behind code in which threads of a warp went different ways.
__device__ __forceinline__ void meet_again() {
  __syncthreads();
  meet_cluster();
}

__device__ __forceinline__ void init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// As the kernels arrive at rings of peers. A release to the cluster would wait for the memory, a
// third of a microsecond; what is freed here was read by nobody.
__device__ __forceinline__ void arrive_peer(uint32_t barrier_of_peer) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_of_peer) : "memory");
}

// Wait for the phase of this parity; `code` names the wait if it does not end.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity, unsigned code) {
  const long long start = clock64();
  uint32_t done = 0;
  while (true) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    if (clock64() - start > kPatience) give_up(code);
  }
}

// Copy from global memory to this CTA.
__device__ __forceinline__ void copy_in(uint32_t to, const void* from, uint32_t bytes,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copy from global memory to the same place of every CTA in `mask`, and count at its barrier.
__device__ __forceinline__ void copy_in_all(uint32_t to, const void* from, uint32_t bytes,
                                            uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}

// Copy shared memory of this CTA to a peer.
__device__ __forceinline__ void copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes,
                                             uint32_t barrier_of_peer) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier_of_peer)
      : "memory");
}

// Store 16 bytes to a peer and count them at its barrier.
__device__ __forceinline__ void store_to_peer(uint32_t to, uint4 value, uint32_t barrier_of_peer) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_of_peer)
      : "memory");
}

__device__ __forceinline__ uint32_t load_peer(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ptx
