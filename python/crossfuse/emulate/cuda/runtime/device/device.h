// The CUDA that generated text may use, in terms of the emulator's calls (abi.h). Included before
// the text itself; CUDA's own headers are never needed.
#pragma once
#include <sys/types.h>  // before the text defines `uint` as a macro

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../abi.h"
#include "vectors.h"

#define CROSSFUSE_EMULATE 1
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
// Fibers change memory behind any call, so the promise of `restrict` would be a lie here.
#define __restrict__
#define __restrict

// Inlined into the caller, so that the runtime sees the return address of a generated statement.
#define CROSSFUSE_LEAF static inline __attribute__((always_inline, unused))
#define CROSSFUSE_DEVICE CROSSFUSE_LEAF

using cudaError_t = int;
static const int warpSize = 32;

#define threadIdx (crossfuse_emulate_index(CROSSFUSE_THREAD_INDEX))
#define blockIdx (crossfuse_emulate_index(CROSSFUSE_BLOCK_INDEX))
#define blockDim (crossfuse_emulate_index(CROSSFUSE_BLOCK_EXTENT))
#define gridDim (crossfuse_emulate_index(CROSSFUSE_GRID_EXTENT))

#define memcpy(to, from, bytes) crossfuse_emulate_copy(to, from, bytes)
#define memset(to, value, bytes) crossfuse_emulate_fill(to, value, bytes)

CROSSFUSE_LEAF void __syncthreads() { crossfuse_emulate_cta_barrier(); }
CROSSFUSE_LEAF void __threadfence() { crossfuse_emulate_fence_memory(); }
CROSSFUSE_LEAF void __threadfence_block() {}
CROSSFUSE_LEAF void __threadfence_system() { crossfuse_emulate_fence_memory(); }
CROSSFUSE_LEAF void __nanosleep(unsigned) {}
CROSSFUSE_LEAF void __trap() { crossfuse_emulate_trap(); }
template <class T>
CROSSFUSE_LEAF T __ldg(const T* pointer) {
  return *pointer;
}

// ---- leaves of dsm.cuh: one PTX instruction each
CROSSFUSE_LEAF unsigned crossfuse_ptx_shared_address(const void* pointer) {
  return crossfuse_emulate_shared_address(pointer);
}
CROSSFUSE_LEAF unsigned crossfuse_ptx_map_rank(unsigned address, unsigned rank) {
  return crossfuse_emulate_map_rank(address, rank);
}
CROSSFUSE_LEAF unsigned crossfuse_ptx_cluster_rank() { return crossfuse_emulate_cluster_rank(); }
CROSSFUSE_LEAF void crossfuse_ptx_cluster_arrive() { crossfuse_emulate_cluster_arrive(0); }
CROSSFUSE_LEAF void crossfuse_ptx_cluster_wait() { crossfuse_emulate_cluster_wait(); }

#define CROSSFUSE_SCALAR_LEAF(suffix, type)                                         \
  CROSSFUSE_LEAF type crossfuse_ptx_load_##suffix(unsigned address) {               \
    return static_cast<type>(crossfuse_emulate_remote_load(address, sizeof(type)).low); \
  }                                                                                 \
  CROSSFUSE_LEAF void crossfuse_ptx_store_##suffix(unsigned address, type bits) {   \
    crossfuse_emulate_remote_store(address, sizeof(type), {bits, 0});               \
  }
CROSSFUSE_SCALAR_LEAF(b8, unsigned char)
CROSSFUSE_SCALAR_LEAF(b16, unsigned short)
CROSSFUSE_SCALAR_LEAF(b32, unsigned)
#undef CROSSFUSE_SCALAR_LEAF

CROSSFUSE_LEAF unsigned long long crossfuse_join(unsigned low, unsigned high) {
  return low | static_cast<unsigned long long>(high) << 32;
}
CROSSFUSE_LEAF unsigned crossfuse_low(unsigned long long word) { return static_cast<unsigned>(word); }
CROSSFUSE_LEAF unsigned crossfuse_high(unsigned long long word) {
  return static_cast<unsigned>(word >> 32);
}
CROSSFUSE_LEAF uint2 crossfuse_ptx_load_b64(unsigned address) {
  CrossfuseWide wide = crossfuse_emulate_remote_load(address, 8);
  return {crossfuse_low(wide.low), crossfuse_high(wide.low)};
}
CROSSFUSE_LEAF uint4 crossfuse_ptx_load_b128(unsigned address) {
  CrossfuseWide wide = crossfuse_emulate_remote_load(address, 16);
  return {crossfuse_low(wide.low), crossfuse_high(wide.low), crossfuse_low(wide.high),
          crossfuse_high(wide.high)};
}
CROSSFUSE_LEAF void crossfuse_ptx_store_b64(unsigned address, uint2 bits) {
  crossfuse_emulate_remote_store(address, 8, {crossfuse_join(bits.x, bits.y), 0});
}
CROSSFUSE_LEAF void crossfuse_ptx_store_b128(unsigned address, uint4 bits) {
  crossfuse_emulate_remote_store(
      address, 16, {crossfuse_join(bits.x, bits.y), crossfuse_join(bits.z, bits.w)});
}

// ---- the launcher's side: a kernel is called with the pointers of its arguments
template <class Argument>
__attribute__((no_sanitize("thread"), noinline)) Argument crossfuse_argument(void* pointer) {
  if constexpr (std::is_pointer_v<Argument>) {
    return static_cast<Argument>(pointer);
  } else {
    return *static_cast<const Argument*>(pointer);  // a tensor map or a number, taken by value
  }
}
template <class... Pointers, std::size_t... Index>
__attribute__((no_sanitize("thread"))) void crossfuse_call(void (*kernel)(Pointers...), void* const* pointers, std::index_sequence<Index...>) {
  kernel(crossfuse_argument<std::decay_t<Pointers>>(pointers[Index])...);
}
template <class... Pointers>
constexpr unsigned crossfuse_count(void (*)(Pointers...)) {
  return sizeof...(Pointers);
}
#define CROSSFUSE_KERNEL(kernel)                                                            \
  {#kernel,                                                                                 \
   [](void* const* pointers) {                                                              \
     crossfuse_call(&kernel, pointers, std::make_index_sequence<crossfuse_count(&kernel)>()); \
   },                                                                                       \
   crossfuse_count(&kernel)}

#include "intrinsics.h"
#include "ptx.h"
#include "warp.h"
