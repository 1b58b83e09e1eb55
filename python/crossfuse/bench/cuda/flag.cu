// Microseconds from one SM's store and release of a flag to the load of the stored word by another
// SM that polls with acquire: half of a round trip, from CTA 0 to another CTA and back. The median
// over all other SMs, since some are further from a line of L2 than others; the spread is over
// them.
//
//   CTA 0   store, release ------> flag 0 \            / acquire, load, store, release ...
//   CTA p                                  acquire, load, store, release ------> flag 1
#include "ptx.cuh"

namespace {

constexpr int kRounds = 1000;
constexpr int kLine = 32;  // words between flags and data: each in a line of its own

__device__ __forceinline__ void raise(uint32_t* flag, uint32_t* word, uint32_t value) {
  *reinterpret_cast<volatile uint32_t*>(word) = value;
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ uint32_t await(const uint32_t* flag, const uint32_t* word,
                                          uint32_t target) {
  const long long start = clock64();
  uint32_t seen = 0;
  while (seen < target) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (clock64() - start > ptx::kPatience) ptx::give_up(31);
  }
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// CTA 0 and CTA `partner` play; the others leave. `memory`: two flags and two words, zero before.
__global__ void play(uint32_t* memory, int partner, int rounds) {
  if (threadIdx.x != 0) return;
  uint32_t *flag0 = memory, *flag1 = memory + kLine;
  uint32_t *word0 = memory + 2 * kLine, *word1 = memory + 3 * kLine;
  uint32_t value = 0;
  for (uint32_t round = 1; round <= rounds; ++round) {
    if (blockIdx.x == 0) {
      raise(flag0, word0, value + 1);
      value = await(flag1, word1, round);
    } else if (blockIdx.x == partner) {
      value = await(flag0, word0, round);
      raise(flag1, word1, value + 1);
    }
  }
  // Each word was one more than the one before: anything else is a flag that did not order them.
  if (blockIdx.x == 0 && value != 2u * rounds) ptx::give_up(32);
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(play);
  uint32_t* memory = harness::device_array<uint32_t>(4 * kLine);
  const int sms = harness::sms();
  std::vector<double> found;
  for (int partner = 1; partner < sms; partner += 5)
    found.push_back(harness::each(
                        2.0 * kRounds,
                        [&] { harness::launch(play, sms, 32, 1, memory, partner, kRounds); },
                        [&] { CHECK(cudaMemsetAsync(memory, 0, 4 * kLine * 4)); })
                        .median);
  harness::report("flag", "", harness::summary(found));
  return 0;
}
