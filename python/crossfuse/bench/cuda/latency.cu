// Microseconds of one load that waits for the load before it: a walk along a list of one thread.
//
//   latency, level "hbm"  lines of 128 bytes out of 256 MiB, 32768 others in each repeat
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

// From the line where the last walk ended.
__global__ void walk(const uint32_t* words, int hops, uint32_t* place) {
  uint32_t at = *place;
  for (int i = 0; i < hops; ++i)
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(words + size_t{at} * kWords));
  *place = at;
}

extern __shared__ __align__(128) unsigned char memory[];

// Each word holds the address of the next one, as seen from the cluster; rank 0 walks along those
// of every peer in turn.
__global__ void walk_peers(int hops, uint32_t* end) {
  const uint32_t base = ptx::shared(memory), own = ptx::peer(base, ptx::rank());
  uint32_t* words = reinterpret_cast<uint32_t*>(memory);
  for (uint32_t i = threadIdx.x; i < 1024; i += blockDim.x)
    words[i * 8] = own + (i + 1) % 1024 * 32;
  ptx::meet_again();
  uint32_t sum = 0;
  if (ptx::rank() == 0 && threadIdx.x == 0)
    for (uint32_t other = 1; other < ptx::cluster_size(); ++other) {
      uint32_t at = ptx::peer(base, other);
      for (int i = 0; i < hops; ++i) at = ptx::load_peer(at);
      sum += at;
    }
  ptx::meet_again();
  if (ptx::rank() == 0 && threadIdx.x == 0) *end = sum;
}

void measure(const char* level, uint32_t* words, uint32_t lines, uint32_t* place) {
  CHECK(cudaMemset(place, 0, sizeof *place));
  link<<<lines / 256, 256>>>(words, lines, 32 - __builtin_ctz(lines));
  harness::report("latency", std::string("\"level\": \"") + level + "\"",
                  harness::each(kHops, [&] { walk<<<1, 1>>>(words, kHops, place); }));
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(walk_peers);
  uint32_t* words = harness::device_array<uint32_t>(size_t{kFarLines} * kWords);
  uint32_t* end = harness::device_array<uint32_t>(1);
  // What was linked last is in the cache still, and is walked to last: after 2 million lines.
  measure("hbm", words, kFarLines, end);
  measure("l2", words, kNearLines, end);
  for (int size : {2, 4, 8, 16})
    harness::report("latency", "\"level\": \"dsm\", \"size\": " + std::to_string(size),
                    harness::each(static_cast<double>(kPeerHops) * (size - 1), [&] {
                      harness::launch(walk_peers, size, 32, size, kPeerHops, end);
                    }));
  return 0;
}
