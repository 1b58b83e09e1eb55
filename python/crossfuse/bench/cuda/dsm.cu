// Bytes that one SM sends to the shared memory of its peers in a microsecond, with all clusters
// busy: in each step every CTA sends 16 KiB to one peer, to another one each time, and hears from
// one. Up to eight steps are under way at once.
//
//   dsm_push, method "bulk"      one thread sends by cp.async.bulk
//   dsm_push, method "st.async"  eight warps send 16 bytes a thread by st.async
#include "ptx.cuh"

namespace {

constexpr int kStages = 8;
constexpr uint32_t kPiece = 16 * 1024;
constexpr int kSenders = 256;
constexpr int kThreads = kSenders + 32;
constexpr int kSteps = 2000;

extern __shared__ __align__(128) unsigned char memory[];

// Distance of the peer that a CTA sends to in a step: 1 to ranks - 1 in turn.
__device__ __forceinline__ uint32_t distance(int step, uint32_t ranks) {
  return 1 + step % (ranks - 1);
}

template <bool kBulk>
__device__ __forceinline__ void send(uint32_t from, uint32_t to, uint32_t barrier) {
  if constexpr (kBulk) {
    ptx::copy_to_peer(to, from, kPiece, barrier);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kPiece / (16 * kSenders); ++i) {
      const uint32_t offset = (i * kSenders + threadIdx.x) * 16;
      ptx::store_to_peer(to + offset, make_uint4(offset, i, threadIdx.x, 0), barrier);
    }
  }
}

template <bool kBulk>
__global__ void __launch_bounds__(kThreads) push(int steps) {
  const uint32_t ranks = ptx::cluster_size(), rank = ptx::rank();
  const uint32_t source = ptx::shared(memory), received = source + kPiece;
  const uint32_t full = received + kStages * kPiece, empty = full + 8 * kStages;
  // One barrier for each stage and peer: what two peers say cannot be mistaken for one another's.
  const int slots = kStages * (static_cast<int>(ranks) - 1);
  for (uint32_t i = threadIdx.x; i < kPiece / 4; i += kThreads)
    reinterpret_cast<uint32_t*>(memory)[i] = i;
  ptx::fence_async_shared();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::init(full + 8 * i, 1);
      ptx::expect(full + 8 * i, kPiece);
    }
    for (int i = 0; i < slots; ++i) ptx::init(empty + 8 * i, 1);
    ptx::publish_init();
  }
  ptx::meet_again();
  if (threadIdx.x < kSenders) {
    if (!kBulk || threadIdx.x == 0)
      for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages;
        const int slot = step % slots, turn = step / slots - (slot < kStages);
        if (step >= kStages) ptx::wait(empty + 8 * slot, turn & 1, 21);
        const uint32_t to = (rank + distance(step, ranks)) % ranks;
        send<kBulk>(source, ptx::peer(received + stage * kPiece, to),
                    ptx::peer(full + 8 * stage, to));
      }
  } else if (threadIdx.x == kSenders) {
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      ptx::wait(full + 8 * stage, step / kStages & 1, 22);
      if (step + kStages >= steps) continue;
      // The place is free for whoever sends to it next.
      ptx::expect(full + 8 * stage, kPiece);
      const int next = step + kStages;
      const uint32_t sender = (rank + ranks - distance(next, ranks)) % ranks;
      ptx::arrive_peer(ptx::peer(empty + 8 * (next % slots), sender));
    }
  }
  ptx::meet_again();
}

template <bool kBulk>
void measure(const char* method, int size) {
  harness::allow(push<kBulk>);
  const int clusters = harness::resident(push<kBulk>, kThreads, size);
  const std::string keys =
      "\"size\": " + std::to_string(size) + ", \"method\": \"" + method + "\"";
  harness::report("dsm_push", keys, harness::rate(static_cast<double>(kPiece) * kSteps, [&] {
                    harness::launch(push<kBulk>, clusters * size, kThreads, size, kSteps);
                  }));
}

}  // namespace

int main() {
  harness::begin();
  for (int size : {2, 4, 8, 16}) {
    measure<true>("bulk", size);
    measure<false>("st.async", size);
  }
  return 0;
}
