// Microseconds of one load that waits for the load before it: a walk along a list of one thread.
//
//   latency, level "hbm"  32768 lines of 128 bytes of 256 MiB, each read for the first time since
//                         the cache was filled with something else
//   latency, level "l2"   the lines of 4 MiB, which were read before, past the L1 cache
//   latency, level "dsm"  words in the shared memory of another CTA of a cluster, by its size
#include "ptx.cuh"

namespace {

constexpr uint32_t kWords = 32;  // of a line
constexpr uint32_t kFarLines = 1u << 21;
constexpr uint32_t kNearLines = 1u << 15;
constexpr int kHops = 1 << 15;
constexpr int kPeerHops = 4096;

// A line says which one is next: all lines in an order without a pattern (a linear congruence of
// full period, modulo a power of two), bits reversed, because its low bits have short periods.
__global__ void link(uint32_t* words, uint32_t lines, int shift) {
  const uint32_t step = blockIdx.x * blockDim.x + threadIdx.x;
  if (step >= lines) return;
  const uint32_t next = (step * 1664525u + 1013904223u) & (lines - 1);
  words[size_t{__brev(step) >> shift} * kWords] = __brev(next) >> shift;
}

__global__ void walk(const uint32_t* words, uint32_t first, int hops, uint32_t* end) {
  uint32_t at = first;
  for (int i = 0; i < hops; ++i)
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(words + size_t{at} * kWords));
  *end = at;
}

extern __shared__ __align__(128) unsigned char memory[];

// Each word holds the address of the next one, as seen from the cluster; rank 0 walks along those
// of every peer in turn.
__global__ void walk_peers(int hops, uint32_t* end) {
  const uint32_t base = ptx::shared(memory), own = ptx::peer(base, ptx::rank());
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  for (uint32_t i = threadIdx.x; i < 1024; i += blockDim.x)
    words[i * 8] = own + (i + 1) % 1024 * 32;
  ptx::meet_cluster();
  uint32_t sum = 0;
  if (ptx::rank() == 0 && threadIdx.x == 0)
    for (uint32_t other = 1; other < ptx::cluster_size(); ++other) {
      uint32_t at = ptx::peer(base, other);
      for (int i = 0; i < hops; ++i) at = ptx::load_peer(at);
      sum += at;
    }
  ptx::meet_cluster();
  if (ptx::rank() == 0 && threadIdx.x == 0) *end = sum;
}

int shift_of(uint32_t lines) { return 32 - __builtin_ctz(lines); }

// The cache is filled with something else before each walk, out of the time that is taken.
void measure_far(const uint32_t* words, uint32_t* other, uint32_t* end) {
  harness::report("latency", "\"level\": \"hbm\"",
                  harness::each(
                      kHops, [&] { walk<<<1, 1>>>(words, 0, kHops, end); },
                      [&] {
                        CHECK(cudaMemsetAsync(other, 0, size_t{kFarLines} * kWords * 4));
                      }));
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(walk_peers);
  uint32_t* words = harness::device_array<uint32_t>(size_t{kFarLines} * kWords);
  uint32_t* other = harness::device_array<uint32_t>(size_t{kFarLines} * kWords);
  uint32_t* end = harness::device_array<uint32_t>(1);
  link<<<kFarLines / 256, 256>>>(words, kFarLines, shift_of(kFarLines));
  measure_far(words, other, end);
  link<<<kNearLines / 256, 256>>>(words, kNearLines, shift_of(kNearLines));
  harness::report("latency", "\"level\": \"l2\"", harness::each(kHops, [&] {
                    walk<<<1, 1>>>(words, 0, kHops, end);
                  }));
  for (int size : {2, 4, 8, 16})
    harness::report("latency", "\"level\": \"dsm\", \"size\": " + std::to_string(size),
                    harness::each(static_cast<double>(kPeerHops) * (size - 1), [&] {
                      harness::launch(walk_peers, size, 32, size, kPeerHops, end);
                    }));
  return 0;
}
