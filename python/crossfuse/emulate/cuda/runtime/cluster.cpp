// Indices, shared memory addresses, and access to the shared memory of other CTAs of the cluster.
#include <algorithm>
#include <cstring>

#include "shadow.h"

namespace emu {

namespace {
// A cluster address holds the CTA rank above kWindowBits; this rank marks a refused one.
constexpr unsigned kNoRank = 0xFF;
constexpr unsigned kOffsetMask = (1u << kWindowBits) - 1;

void place(SharedArray& array, const char* name, size_t bytes, size_t alignment) {
  array.name = name;
  array.bytes = bytes;
  array.offset = (device.grid->shared_end + alignment - 1) / alignment * alignment;
  array.placed = true;
  for (const Cta& cta : ctas_of(*device.grid)) {
    memset(window_of(cta.window) + device.grid->shared_end, kPoison,
           array.offset + bytes + kRedZone - device.grid->shared_end);
  }
  device.grid->shared_end = array.offset + bytes + kRedZone;
}

// A peer's memory exists from the first cluster barrier that all its threads arrived at.
void note_started(Cta& target, size_t offset, Site site) {
  Thread& self = *device.current;
  if (self.acquired == 0 && self.waited == 0 && is_news("peer-not-started", site, kNoSite)) {
    report({"peer-not-started", shared_place(offset), site, kNoSite, current_cta(),
            current_thread(),
            format("CTA rank %u touches the shared memory of rank %u before any cluster barrier",
                   self.cta->rank, target.rank)});
  }
}

// Follows a remote access in time: a peer's memory exists until it exits.
void note_remote(Cta& target, size_t offset, Site site) {
  Thread& self = *device.current;
  if (&target == self.cta) return;
  note_started(target, offset, site);
  self.touched.resize(device.grid->launch.ctas());
  self.touched[target.rank] = {true, self.arrived, site, offset};
}

// Whether a CTA that has waited at some cluster barriers may know that an access to it is over: its
// thread has arrived at one of them after it, with release.
bool is_past(const LastTouch& touch, const Thread& thread, uint16_t waited) {
  for (uint16_t each = touch.arrived + 1; each <= waited; ++each) {
    const std::vector<uint16_t>& relaxed = thread.relaxed;
    if (std::find(relaxed.begin(), relaxed.end(), each) == relaxed.end()) return true;
  }
  return false;
}

// A CTA may exit only when nobody can touch its shared memory any more.
void check_exit(const Cta& cta) {
  uint16_t waited = 0;
  for (const Thread* thread : cta.threads) waited = std::max(waited, thread->waited);
  for (const Cta& other : ctas_of(*cta.cluster)) {
    for (const Thread* thread : other.threads) {
      if (thread->touched.empty()) continue;
      const LastTouch& touch = thread->touched[cta.rank];
      if (!touch.any || is_past(touch, *thread, waited)) continue;
      if (!is_news("early-exit", touch.site, kNoSite)) continue;
      report({"early-exit", shared_place(touch.offset), touch.site, kNoSite,
              static_cast<int>(cta.linear), -1,
              format("CTA %u (rank %u) may exit while CTA %u thread %u touches its shared memory: "
                     "it waits at %u cluster barriers, and needs one after this access%s",
                     cta.linear, cta.rank, other.linear, thread->index(), waited,
                     waited > touch.arrived ? " that this thread arrives at with release" : "")});
    }
  }
}

uint8_t* remote(unsigned address, unsigned bytes, Mode mode, Site site) {
  unsigned rank = address >> kWindowBits;
  if (rank == kNoRank) return nullptr;
  Cta& target = ranked(rank);
  size_t offset = address & kOffsetMask;
  if (!remote_access(target, offset, bytes, mode, site)) return nullptr;
  note_remote(target, offset, site);
  return window_of(target.window) + offset;
}

}  // namespace

void note_peer(unsigned window, size_t offset, Site site) {
  note_remote(device.ctas[window], offset, site);
}

}  // namespace emu

using namespace emu;

extern "C" {

CrossfuseIndex crossfuse_emulate_index(int which) {
  const Thread& self = *device.current;
  const Launch& launch = device.grid->launch;
  switch (which) {
    case CROSSFUSE_THREAD_INDEX: return self.thread_index;
    case CROSSFUSE_BLOCK_INDEX: return self.block_index;
    case CROSSFUSE_BLOCK_EXTENT: return launch.block;
    case CROSSFUSE_GRID_EXTENT: return launch.grid;
    case CROSSFUSE_CTA_IN_CLUSTER: return self.cta_in_cluster;
    case CROSSFUSE_CLUSTER_EXTENT: return launch.cluster;
    case CROSSFUSE_CLUSTER_INDEX: return self.cta->cluster->index;
    default:
      return {launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
              launch.grid.z / launch.cluster.z};
  }
}
unsigned crossfuse_emulate_cluster_rank() { return device.current->cta->rank; }
unsigned crossfuse_emulate_thread_rank() { return device.current->index(); }

void* crossfuse_emulate_dynamic_shared(unsigned long alignment) {
  SharedArray& array = device.grid->arrays[0];
  if (!array.placed) {
    // Aligned as declared and not better, so that a hidden assumption shows.
    device.grid->shared_end = kWindowStart;
    place(array, "", device.grid->launch.dynamic_bytes, 2 * alignment);
    size_t shift = alignment;
    array.offset += shift;
    device.grid->shared_end += shift;
  }
  return window_of(device.current->cta->window) + array.offset;
}

void* crossfuse_emulate_static_shared(int id, unsigned long bytes, unsigned long alignment,
                                      const char* name) {
  if (device.grid->arrays.size() <= static_cast<size_t>(id) + 1) device.grid->arrays.resize(id + 2);
  SharedArray& array = device.grid->arrays[id + 1];
  if (!array.placed) place(array, name, bytes, alignment);
  return window_of(device.current->cta->window) + array.offset;
}

unsigned crossfuse_emulate_shared_address(const void* pointer) {
  const Cta& own = *device.current->cta;
  size_t offset = static_cast<const uint8_t*>(pointer) - window_of(own.window);
  if (offset <= kOffsetMask) return own.rank << kWindowBits | static_cast<unsigned>(offset);
  Site site = CROSSFUSE_SITE;
  if (is_news("out-of-bounds", site, kNoSite)) {
    report({"out-of-bounds", {}, site, kNoSite, current_cta(), current_thread(),
            "the address of a remote access is not in shared memory"});
  }
  return kNoRank << kWindowBits;
}

unsigned crossfuse_emulate_map_rank(unsigned address, unsigned rank) {
  if (address >> kWindowBits == kNoRank) return address;
  if (rank < device.grid->launch.ctas()) return rank << kWindowBits | (address & kOffsetMask);
  Site site = CROSSFUSE_SITE;
  if (is_news("bad-rank", site, kNoSite)) {
    report({"bad-rank", shared_place(address & kOffsetMask), site, kNoSite, current_cta(),
            current_thread(),
            format("rank %d in a cluster of %u CTAs", static_cast<int>(rank),
                   device.grid->launch.ctas())});
  }
  return kNoRank << kWindowBits;
}

CrossfuseWide crossfuse_emulate_remote_load(unsigned address, unsigned bytes) {
  CrossfuseWide value{~0ull, ~0ull};
  if (const uint8_t* from = remote(address, bytes, Mode::kRead, CROSSFUSE_SITE)) {
    memcpy(&value, from, bytes);
  }
  return value;
}

void crossfuse_emulate_remote_store(unsigned address, unsigned bytes, CrossfuseWide value) {
  if (uint8_t* to = remote(address, bytes, Mode::kWrite, CROSSFUSE_SITE)) memcpy(to, &value, bytes);
}

}  // extern "C"
