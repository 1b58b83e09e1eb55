// Floating-point operations of one SM in a microsecond by wgmma with both operands in shared
// memory, all SMs at work, by the tile of a CTA. Compiled once for each element type: TYPE is its
// number and `products.cuh` is written by Python (products.py).
//
// A warpgroup multiplies 64 rows, or twice 64 of 256 (as the kernels do): 1, 2 and 2 warpgroups. A
// step is 128 bytes of the reduction, four instructions for 64 rows; two stages take turns; one
// group of instructions is under way while the next is issued.
#include "products.cuh"
#include "ptx.cuh"

namespace {

constexpr uint32_t kRowBytes = 128;  // of the reduction in a stage, swizzled by 128 bytes

extern __shared__ __align__(1024) unsigned char memory[];

// Matrix descriptor (PTX ISA, wgmma): address, leading offset 16 bytes (without a meaning here),
// eight rows of 128 bytes between repeats of the pattern, swizzle of 128 bytes.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

template <int kColumns, int kBlocks>
__device__ __forceinline__ void step(float (&sums)[kBlocks][kColumns / 2], uint64_t left,
                                     uint64_t right) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      Product<kColumns>::run(sums[block], left + (block * 64 * kRowBytes >> 4) + 2 * k,
                             right + 2 * k);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// kGroups warpgroups of kBlocks blocks of 64 rows.
template <int kColumns, int kGroups, int kBlocks>
__global__ void __launch_bounds__(128 * kGroups, 1) multiply(int steps, float* sink) {
  constexpr uint32_t kLeft = 64 * kBlocks * kGroups * kRowBytes, kRight = kColumns * kRowBytes;
  const uint32_t base = (ptx::shared(memory) + 1023) & ~1023u, group = threadIdx.x / 128;
  // Numbers between -1 and 1 in all element types: sign, exponent below one, any mantissa.
  uint32_t seed = threadIdx.x * 2654435761u + blockIdx.x;
  for (uint32_t at = threadIdx.x * 4; at < 2 * (kLeft + kRight); at += blockDim.x * 4) {
    seed = seed * 1664525u + 1013904223u;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + at), "r"(seed & kNumbers) : "memory");
  }
  ptx::fence_async_shared();
  __syncthreads();
  uint64_t left[2], right[2];
  for (uint32_t i = 0; i < 2; ++i) {
    left[i] = describe(base + i * kLeft + group * 64 * kBlocks * kRowBytes);
    right[i] = describe(base + 2 * kLeft + i * kRight);
  }
  float sums[kBlocks][kColumns / 2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sums[block][i] = 0;
  for (int i = 0; i < steps; i += 2) {
#pragma unroll
    for (int stage = 0; stage < 2; ++stage) {
      step<kColumns, kBlocks>(sums, left[stage], right[stage]);
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  float total = 0;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) total += sums[block][i];
  if (total == 12345.678f) *sink = total;
}

template <int kColumns, int kGroups, int kBlocks>
void measure() {
  constexpr int kRows = 64 * kGroups * kBlocks;
  // A tenth of a millisecond to two, short enough to be over before the power limit is felt.
  constexpr int kSteps = kRows * kColumns < 64 * 64 ? 8192 : 2048;
  auto* kernel = multiply<kColumns, kGroups, kBlocks>;
  harness::allow(kernel);
  const double flops = 2.0 * kRows * kColumns * kSteps * (kRowBytes / kElementBytes);
  const std::string keys = "\"rows\": " + std::to_string(kRows) +
                           ", \"columns\": " + std::to_string(kColumns) + ", \"dtype\": \"" +
                           kTypeName + "\"";
  harness::report("tensor", keys, harness::rate(flops, [&] {
                    harness::launch(kernel, harness::sms(), 128 * kGroups, 1, kSteps, nullptr);
                  }));
}

template <int kColumns>
void measure_rows() {
  measure<kColumns, 1, 1>();
  measure<kColumns, 2, 1>();
  // 256 rows keep sums of 128 rows in the registers of a warpgroup: up to 192 columns.
  if constexpr (kColumns <= 192) measure<kColumns, 2, 2>();
}

template <int... kColumns>
void measure_all(Columns<kColumns...>) {
  (measure_rows<kColumns>(), ...);
}

}  // namespace

int main() {
  harness::begin();
  measure_all(MeasuredColumns{});
  return 0;
}
