// How kernels of several GPUs wait for each other, by counts in the memory of each.
//
// Row r of the counts lies in GPU r. Its first line of L2: how many CTAs of each rank have arrived there, of up
// to 8; behind these the deadline of waits in units of 2^20 ns (0 for none), and the address of a word of the host
// that is told whom this GPU waited for in vain. Then a line for each CTA of kernels that exchange: how many turns
// the CTA of that number has filled, in each rank. Counts wrap around and are compared by their difference.
// Nothing is ever reset.
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

// One thread: waits until a count of a peer in the own row has come to what is due. A wait in vain ends the
// kernel with an error of CUDA, so that nobody takes for a result what was never sent.
__device__ __forceinline__ void crossfuse_await_peer(const unsigned* own, int peer, const unsigned* count,
                                                     unsigned due) {
  if (crossfuse_has_arrived(count, due)) return;
  const unsigned deadline = crossfuse_rank_word(own + 8);
  const unsigned long long begin = crossfuse_rank_time();
  while (!crossfuse_has_arrived(count, due)) {
    if (!deadline || crossfuse_rank_time() - begin <= deadline) continue;
    **(volatile int* const*)(own + 10) = peer + 1;
    asm volatile("fence.acq_rel.sys;" : : : "memory");
    asm volatile("trap;");
  }
}

// All threads of a CTA: waits until all ranks have done what comes before this kernel. The own count says
// how much that is: kernels of one rank follow each other, and all ranks run the same ones.
__device__ __forceinline__ void crossfuse_await_ranks(void* arrivals, int rank, int ranks, long long row) {
  const unsigned* own = (const unsigned*)arrivals + rank * row;
  const unsigned due = crossfuse_rank_word(own + rank);
  for (int peer = crossfuse_rank_thread(); peer < ranks; peer += crossfuse_rank_threads()) {
    crossfuse_await_peer(own, peer, own + peer, due);
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

// The turns of this CTA's number in the memory of one rank.
__device__ __forceinline__ unsigned* crossfuse_turns_at(void* turns, int rank, long long row) {
  return (unsigned*)turns + rank * row + 32 * (1 + blockIdx.x);
}

// How many turns this CTA has filled. Nobody else writes that, and it does so only when all of its threads know.
__device__ __forceinline__ int crossfuse_turn_of_ranks(void* turns, int rank, int ranks, long long row) {
  return crossfuse_rank_word(crossfuse_turns_at(turns, rank, row) + rank);
}

// All threads of a CTA: what it has filled is filled for all ranks, and so is what the CTAs of its number have.
// When it fills that place again, two turns on, they have filled the other one, in a kernel that began when
// that which reads this one was over.
__device__ __forceinline__ void crossfuse_exchange_with_ranks(void* turns, int rank, int ranks, long long row,
                                                              int turn) {
  __syncthreads();
  for (int peer = crossfuse_rank_thread(); peer < ranks; peer += crossfuse_rank_threads()) {
    unsigned* count = crossfuse_turns_at(turns, peer, row) + rank;
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(count), "r"(turn + 1) : "memory");
  }
  const unsigned* own = (const unsigned*)turns + rank * row;
  for (int peer = crossfuse_rank_thread(); peer < ranks; peer += crossfuse_rank_threads()) {
    crossfuse_await_peer(own, peer, crossfuse_turns_at(turns, rank, row) + peer, turn + 1);
  }
  __syncthreads();
}
#endif
