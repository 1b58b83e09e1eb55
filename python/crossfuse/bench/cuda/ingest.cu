// Bytes that one SM takes into its shared memory in a microsecond by bulk copies of TMA, as the
// rings of our kernels do: six stages of 32 KiB, a loader that refills a stage once it is free,
// and a reader that frees it as soon as it has arrived.
//
//   sm_ingest             one CTA alone, from L2
//   sm_ingest_all         one CTA on every SM, from L2; hbm_ingest_all: from HBM
//   multicast_ingest      clusters on all SMs: each CTA loads its share of a stage for all of its
//                         cluster; bytes that arrive at one SM, from L2
//   multicast_ingest_one  the same of one cluster alone
#include "ptx.cuh"

namespace {

constexpr int kStages = 6;
constexpr uint32_t kStage = 32 * 1024;
constexpr size_t kLarge = size_t{4} << 30;
constexpr size_t kSmall = size_t{16} << 20;

extern __shared__ __align__(128) unsigned char memory[];

// Two warps: a thread of warp 0 loads; warp 1 waits and frees, each lane the stage of one CTA.
__global__ void __launch_bounds__(64) ingest(const unsigned char* data, size_t window, int steps) {
  const uint32_t ranks = ptx::cluster_size(), rank = ptx::rank();
  const uint32_t base = ptx::shared(memory), full = base + kStages * kStage;
  const uint32_t empty = full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::init(full + 8 * i, 1);
      ptx::init(empty + 8 * i, ranks);
    }
    ptx::publish_init();
  }
  ptx::meet_again();
  // Shares are multiples of 16 bytes; the last one is smaller where `ranks` is no power of two.
  const uint32_t whole = (kStage / 16 + ranks - 1) / ranks * 16;
  const uint32_t begin = min(rank * whole, kStage), share = min(whole, kStage - begin);
  const uint16_t all = static_cast<uint16_t>((1u << ranks) - 1);
  const size_t clusters = gridDim.x / ranks, cluster = blockIdx.x / ranks;
  if (threadIdx.x == 0) {
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      if (step >= kStages) ptx::wait(empty + 8 * stage, (step / kStages - 1) & 1, 11);
      ptx::expect(full + 8 * stage, kStage);
      const size_t place = (step * clusters + cluster) * kStage % window;
      const uint32_t to = base + stage * kStage + begin;
      if (share == 0) continue;
      if (ranks == 1)
        ptx::copy_in(to, data + place, kStage, full + 8 * stage);
      else
        ptx::copy_in_all(to, data + place + begin, share, full + 8 * stage, all);
    }
  } else if (threadIdx.x >= 32 && threadIdx.x - 32 < ranks) {
    const uint32_t freed = ptx::peer(empty, threadIdx.x - 32);
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      ptx::wait(full + 8 * stage, step / kStages & 1, 12);
      ptx::arrive_peer(freed + 8 * stage);
    }
  }
  // Nobody leaves while a peer still arrives here.
  ptx::meet_again();
}

// `counted`: SMs whose bytes are added up.
void measure(const char* name, const std::string& keys, const unsigned char* data, int size,
             int clusters, size_t window, int steps, int counted = 1) {
  // What is read again has to be in L2 before the first measured run, which `times` sees to.
  harness::report(name, keys, harness::rate(static_cast<double>(steps) * kStage * counted, [&] {
                    harness::launch(ingest, clusters * size, 64, size, data, window, steps);
                  }));
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(ingest);
  const unsigned char* data = harness::device_array<unsigned char>(kLarge);
  const int sms = harness::resident(ingest, 64, 1);
  measure("sm_ingest", "", data, 1, 1, kSmall, 2048);
  measure("sm_ingest_all", "", data, 1, sms, kSmall, 2048, sms);
  measure("hbm_ingest_all", "", data, 1, sms, kLarge, 992, sms);
  for (int size : {1, 2, 4, 8, 16}) {
    const int clusters = harness::resident(ingest, 64, size);
    const std::string keys = "\"size\": " + std::to_string(size);
    measure("multicast_ingest_one", keys, data, size, 1, kSmall, 2048);
    measure("multicast_ingest", keys, data, size, clusters, kSmall, 2048);
  }
  return 0;
}
