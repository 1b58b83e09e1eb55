// Barriers between the kernels of several GPUs, by counts in the memory of each.
//
// Row r of `arrivals` lies in GPU r: how many CTAs of each rank have arrived there, then whom this GPU
// waited for in vain (1 + its rank, 0 for nobody), then the deadline of its waits in units of 2^20 ns (0
// for none). Counts wrap around and are compared by their difference. Nothing is ever reset.
#ifndef CROSSFUSE_RANKS_CUH
#define CROSSFUSE_RANKS_CUH

__device__ __forceinline__ unsigned crossfuse_rank_thread() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ __forceinline__ unsigned crossfuse_rank_threads() {
  return blockDim.x * blockDim.y * blockDim.z;
}
__device__ __forceinline__ unsigned crossfuse_rank_word(const unsigned* word) {
  unsigned value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ bool crossfuse_has_arrived(const unsigned* count, unsigned due) {
  unsigned seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  return (int)(seen - due) >= 0;
}
__device__ __forceinline__ unsigned long long crossfuse_rank_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now >> 20;
}

// All threads of a CTA: waits until all ranks have done what comes before this kernel. The own count says
// how much that is: kernels of one rank follow each other, and all ranks run the same ones. After a wait in
// vain, nobody waits again.
__device__ __forceinline__ void crossfuse_await_ranks(void* arrivals, int rank, int ranks, long long row) {
  unsigned* own = (unsigned*)arrivals + rank * row;
  const unsigned due = crossfuse_rank_word(own + rank);
  for (int peer = crossfuse_rank_thread(); peer < ranks; peer += crossfuse_rank_threads()) {
    if (crossfuse_has_arrived(own + peer, due) || crossfuse_rank_word(own + ranks)) continue;
    const unsigned deadline = crossfuse_rank_word(own + ranks + 1);
    const unsigned long long begin = crossfuse_rank_time();
    bool arrived = false;
    do {
      arrived = crossfuse_has_arrived(own + peer, due);
    } while (!arrived && !(deadline && crossfuse_rank_time() - begin > deadline));
    if (arrived) continue;
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(own + ranks), "r"(peer + 1) : "memory");
  }
  __syncthreads();
}

// All threads of a CTA: what the CTA has done is done for all ranks. The barrier orders the stores of other
// threads before the release of this one.
__device__ __forceinline__ void crossfuse_arrive_at_ranks(void* arrivals, int rank, int ranks,
                                                          long long row) {
  __syncthreads();
  for (int peer = crossfuse_rank_thread(); peer < ranks; peer += crossfuse_rank_threads()) {
    unsigned* count = (unsigned*)arrivals + peer * row + rank;
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" : : "l"(count), "r"(1) : "memory");
  }
}
#endif
