// Distributed shared memory (DSM) access and cluster barriers for sm_90.
//
// Leaves named crossfuse_ptx_* are one PTX instruction each; a CPU emulation defines
// CROSSFUSE_EMULATE and supplies its own. Everything above the leaves is plain C++ and is compiled
// in both worlds. Helpers move bits, not values: a vector of f16, bf16, f32, i32 or fp8 is the
// unsigned word of its size.
#ifndef CROSSFUSE_DSM_CUH
#define CROSSFUSE_DSM_CUH

#ifndef CROSSFUSE_EMULATE
#define CROSSFUSE_DEVICE __device__ __forceinline__

CROSSFUSE_DEVICE unsigned crossfuse_ptx_shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
CROSSFUSE_DEVICE unsigned crossfuse_ptx_map_rank(unsigned address, unsigned rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
CROSSFUSE_DEVICE unsigned crossfuse_ptx_cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
CROSSFUSE_DEVICE void crossfuse_ptx_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
CROSSFUSE_DEVICE void crossfuse_ptx_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
CROSSFUSE_DEVICE unsigned char crossfuse_ptx_load_b8(unsigned address) {
  unsigned short bits;
  asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return static_cast<unsigned char>(bits);
}
CROSSFUSE_DEVICE unsigned short crossfuse_ptx_load_b16(unsigned address) {
  unsigned short bits;
  asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}
CROSSFUSE_DEVICE unsigned crossfuse_ptx_load_b32(unsigned address) {
  unsigned bits;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  return bits;
}
CROSSFUSE_DEVICE uint2 crossfuse_ptx_load_b64(unsigned address) {
  uint2 bits;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y) : "r"(address) : "memory");
  return bits;
}
CROSSFUSE_DEVICE uint4 crossfuse_ptx_load_b128(unsigned address) {
  uint4 bits;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "r"(address) : "memory");
  return bits;
}
CROSSFUSE_DEVICE void crossfuse_ptx_store_b8(unsigned address, unsigned char bits) {
  asm volatile("st.shared::cluster.u8 [%0], %1;"
               :: "r"(address), "h"(static_cast<unsigned short>(bits)) : "memory");
}
CROSSFUSE_DEVICE void crossfuse_ptx_store_b16(unsigned address, unsigned short bits) {
  asm volatile("st.shared::cluster.u16 [%0], %1;" :: "r"(address), "h"(bits) : "memory");
}
CROSSFUSE_DEVICE void crossfuse_ptx_store_b32(unsigned address, unsigned bits) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(address), "r"(bits) : "memory");
}
CROSSFUSE_DEVICE void crossfuse_ptx_store_b64(unsigned address, uint2 bits) {
  asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};"
               :: "r"(address), "r"(bits.x), "r"(bits.y) : "memory");
}
CROSSFUSE_DEVICE void crossfuse_ptx_store_b128(unsigned address, uint4 bits) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "r"(address), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w) : "memory");
}
#endif  // CROSSFUSE_EMULATE

// Where the element at `own` of this CTA lies in the CTA `rank` of the same cluster: every CTA has
// the same shared memory layout, so the offset is the same and only the window differs.
CROSSFUSE_DEVICE unsigned crossfuse_dsm_address(const void* own, int rank) {
  return crossfuse_ptx_map_rank(crossfuse_ptx_shared_address(own), static_cast<unsigned>(rank));
}

#define CROSSFUSE_DSM_ACCESS(suffix, type)                                                   \
  CROSSFUSE_DEVICE type crossfuse_dsm_load_##suffix(const void* own, int rank) {             \
    return crossfuse_ptx_load_##suffix(crossfuse_dsm_address(own, rank));                    \
  }                                                                                          \
  CROSSFUSE_DEVICE void crossfuse_dsm_store_##suffix(const void* own, int rank, type bits) { \
    crossfuse_ptx_store_##suffix(crossfuse_dsm_address(own, rank), bits);                    \
  }
CROSSFUSE_DSM_ACCESS(b8, unsigned char)
CROSSFUSE_DSM_ACCESS(b16, unsigned short)
CROSSFUSE_DSM_ACCESS(b32, unsigned)
CROSSFUSE_DSM_ACCESS(b64, uint2)
CROSSFUSE_DSM_ACCESS(b128, uint4)

// All threads of all CTAs of the cluster: what they did before is visible to all of them after.
CROSSFUSE_DEVICE void crossfuse_cluster_sync() {
  crossfuse_ptx_cluster_arrive();
  crossfuse_ptx_cluster_wait();
}
#endif  // CROSSFUSE_DSM_CUH
