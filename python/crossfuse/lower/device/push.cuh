// The CTAs of a cluster tell each other their states, each word stored where it is wanted.
//
// A CTA's mbarrier counts the bytes that arrive, so that nobody waits for more than these: cluster
// barriers that order memory (release, acquire) wait for all loads and stores under way, and cost
// a row of 64 KiB in eight CTAs a fifth of its time. Peers must have started before they are
// reached, which they say at the start and which is awaited where the first word leaves.
#ifndef CROSSFUSE_PUSH_CUH
#define CROSSFUSE_PUSH_CUH

// Set up the barrier for `bytes`, and say that this CTA may be reached.
CROSSFUSE_DEVICE void crossfuse_push_open(void* barrier, unsigned bytes) {
  unsigned address = crossfuse_ptx_shared_address(barrier);
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(address), "r"(1u) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(address), "r"(bytes) : "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Wait until all CTAs of the cluster may be reached.
CROSSFUSE_DEVICE void crossfuse_push_begin() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Store a word at the place of `own` in the CTA `rank`, whose barrier counts it.
CROSSFUSE_DEVICE void crossfuse_push_b32(const void* own, int rank, unsigned bits, void* barrier) {
  unsigned address = crossfuse_dsm_address(own, rank);
  unsigned counter = crossfuse_dsm_address(barrier, rank);
  float word = __uint_as_float(bits);
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               :: "r"(address), "f"(word), "r"(counter) : "memory");
}

// The word that a peer stored at the place of `own`.
CROSSFUSE_DEVICE unsigned crossfuse_push_take(const void* own) {
  unsigned address = crossfuse_ptx_shared_address(own);
  float word;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(word) : "r"(address) : "memory");
  return __float_as_uint(word);
}

// Wait until all bytes are there; they come from the whole cluster.
CROSSFUSE_DEVICE void crossfuse_push_end(void* barrier) {
  unsigned address = crossfuse_ptx_shared_address(barrier);
  asm volatile(
      "{\n"
      ".reg .pred P1;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\n"
      "bra LAB_WAIT;\n"
      "DONE:\n"
      "}\n"
      :: "r"(address), "r"(0u) : "memory");
}
#endif  // CROSSFUSE_PUSH_CUH
