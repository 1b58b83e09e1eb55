// What orders two accesses of one place, and reports of those that nothing does.
#pragma once
#include "shadow.h"

namespace emu {

// What must be so before the next access: a write is visible, a read is over.
enum class Due : uint8_t { kVisible, kOver };

inline bool clocks_order(const Access& e, const Thread& now, Due due) {
  return due == Due::kVisible ? is_known(e, now) : is_over(e, now);
}

// Whether everything the current thread does now comes after `e`. Barriers decide, not luck:
// a CTA barrier orders threads of one CTA, a cluster barrier those who waited after the arrival,
// a __syncwarp the lanes that met, a named barrier the threads that did. Where more than that orders
// accesses, clocks do: in global memory of a cooperative launch, and by mbarriers.
inline bool ordered(const Access& e, const Thread& now, bool shared, Due due = Due::kVisible) {
  if (e.cluster < device.first_cluster) return true;
  const Grid& other = *start_of(e).grid;
  const bool follows = other.launch.stream == device.grid->launch.stream;
  if (&other != device.grid && follows) return is_launch_over(other, now);
  if (device.grid->launch.cooperative && !shared) return clocks_order(e, now, due);
  if (e.cluster != now.cta->cluster->id) return false;
  if (e.agent >= static_cast<unsigned>(Agent::kFills)) return clocks_order(e, now, due);
  if (e.thread == now.id || now.acquired > e.arrived) return true;
  if (e.rank() == now.cta->rank) {
    if (now.cta_epoch > e.cta_epoch) return true;
    if (now.met && (*now.met)[e.index()] > e.warp_epoch) return true;
    const bool same_warp = e.index() / kWarp == now.index() / kWarp;
    if (same_warp && now.seen[e.index() % kWarp] > e.warp_epoch) return true;
  }
  return device.grid->launch.clocked && clocks_order(e, now, due);
}

inline bool is_empty(const Access& e, const Thread& now, bool shared) {
  // Shared memory lives as long as its cluster: older records are of another life.
  return shared ? e.cluster != now.cta->cluster->id : e.cluster == 0;
}

inline bool is_same_cta(const Access& a, const Access& b) {
  return a.cluster == b.cluster && a.rank() == b.rank();
}

inline bool is_atomic(Mode mode) { return mode >= Mode::kAtomic; }
inline bool reads(Mode mode) { return mode != Mode::kWrite && mode != Mode::kAtomicWrite; }
inline bool writes(Mode mode) { return mode != Mode::kRead && mode != Mode::kAtomicRead; }

Place place_of(const Region& region, size_t offset);
const char* verb(Mode mode);
void race(const Region& region, size_t offset, const Access& before, bool before_wrote,
          const Access& now, Mode mode);

}  // namespace emu
