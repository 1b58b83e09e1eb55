// Microseconds of a cluster barrier (arrive with release, wait with acquire), by cluster size, all
// clusters at it; and how many clusters run at once, as the driver counts.
#include "ptx.cuh"

namespace {

constexpr int kMeetings = 2000;

__global__ void meet(int meetings) {
  for (int i = 0; i < meetings; ++i) ptx::meet_cluster();
}

}  // namespace

int main() {
  harness::begin();
  harness::allow(meet);
  for (int size = 1; size <= 16; ++size) {
    const int clusters = harness::resident(meet, 128, size);
    if (clusters == 0) continue;
    const std::string keys = "\"size\": " + std::to_string(size);
    harness::report("resident", keys, {static_cast<double>(clusters), 0, 1});
    harness::report("cluster_barrier", keys, harness::each(kMeetings, [&] {
                      harness::launch(meet, clusters * size, 128, size, kMeetings);
                    }));
  }
  return 0;
}
