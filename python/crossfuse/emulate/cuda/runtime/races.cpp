#include "races.h"

namespace emu {

namespace {
// What would have ordered two accesses.
const char* missing_between(const Access& before, const Access& now, bool shared) {
  if (start_of(before).grid->launch.stream != start_of(now).grid->launch.stream) {
    return "they run in different GPUs: no release and acquire of a flag lie between, at the scope of the "
           "system";
  }
  if (start_of(before).grid != start_of(now).grid) {
    return "their launches may run at the same time: no griddepcontrol.wait lies between";
  }
  if (device.grid->launch.cooperative && !shared) {
    if (before.agent == static_cast<unsigned>(Agent::kStores)) {
      return "the copy is not waited for, or no release and acquire of a flag follow";
    }
    if (before.agent == static_cast<unsigned>(Agent::kLoads)) {
      return "nothing that follows the end of the copy lies between";
    }
    if (!is_same_cta(before, now)) return "no release and acquire of a flag lie between";
  }
  if (before.cluster != now.cluster) return "clusters of one launch are never ordered";
  if (before.agent >= static_cast<unsigned>(Agent::kFills)) {
    return "the phase of the mbarrier that counts it is not waited for, or not with a scope that "
           "includes who sent it";
  }
  if (before.rank() != now.rank()) return "no cluster barrier lies between";
  bool same_warp = before.index() / kWarp == now.index() / kWarp;
  return same_warp ? "no CTA barrier or __syncwarp lies between" : "no CTA barrier lies between";
}
}  // namespace

Place place_of(const Region& region, size_t offset) {
  if (region.argument < 0) return shared_place(offset);
  return {region.argument, "", static_cast<long>(offset)};
}

const char* verb(Mode mode) {
  return mode == Mode::kAtomic ? "updates" : reads(mode) ? "reads" : "writes";
}

void race(const Region& region, size_t offset, const Access& before, bool before_wrote,
          const Access& now, Mode mode) {
  if (!is_news("race", before.site, now.site)) return;
  const char* done = !before_wrote ? "reads" : before.site & kAtomic ? "updates" : "writes";
  const bool fills = before.agent >= static_cast<unsigned>(Agent::kFills);
  report({fills ? "async-race" : "race", place_of(region, offset), before.site, now.site,
          current_cta(), current_thread(),
          format("%s %s and %s %s it, and %s", who(before).c_str(), done, who(now).c_str(),
                 verb(mode), missing_between(before, now, region.argument < 0))});
}

}  // namespace emu
