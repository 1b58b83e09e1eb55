// Bytes that all SMs together read and write in a microsecond, in HBM and in L2, by ordinary
// 16-byte accesses. HBM: each byte of 4 GiB once. L2: 16.5 MiB (a third of the cache) many times,
// past the L1 caches, each time by other SMs.
#include "harness.h"

namespace {

constexpr size_t kLarge = size_t{4} << 30;
constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr size_t kPiece = sizeof(uint4) * kThreads * kUnroll;  // bytes of a CTA at once
constexpr size_t kShift = 37;  // pieces between a CTA's own in two passes

__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// A CTA takes pieces in turn with the others, `passes` times.
__global__ void read(const uint4* data, size_t pieces, int passes, uint32_t* sink) {
  uint32_t sum = 0;
  for (int pass = 0; pass < passes; ++pass)
    for (size_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
      const size_t place = (piece + pass * kShift) % pieces;
      const uint4* from = data + place * kThreads * kUnroll + threadIdx.x;
      uint4 values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) values[i] = load(from + i * kThreads);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    }
  if (sum == 1) *sink = sum;
}

__global__ void write(uint4* data, size_t pieces, int passes) {
  for (int pass = 0; pass < passes; ++pass)
    for (size_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
      const size_t place = (piece + pass * kShift) % pieces;
      uint4* to = data + place * kThreads * kUnroll + threadIdx.x;
      const uint4 value = make_uint4(threadIdx.x, pass, blockIdx.x, 0);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) to[i * kThreads] = value;
    }
}

void measure(const char* reads, const char* writes, uint4* data, size_t pieces, int passes) {
  const int grid = 4 * harness::sms();
  const double moved = static_cast<double>(pieces * kPiece) * passes;
  harness::report(reads, "", harness::rate(moved, [&] {
                    read<<<grid, kThreads>>>(data, pieces, passes, nullptr);
                  }));
  harness::report(writes, "",
                  harness::rate(moved, [&] { write<<<grid, kThreads>>>(data, pieces, passes); }));
}

}  // namespace

int main() {
  harness::begin();
  uint4* data = harness::device_array<uint4>(kLarge / sizeof(uint4));
  measure("hbm_read", "hbm_write", data, kLarge / kPiece, 1);
  // One piece for each CTA.
  measure("l2_read", "l2_write", data, 4 * harness::sms(), 256);
  return 0;
}
