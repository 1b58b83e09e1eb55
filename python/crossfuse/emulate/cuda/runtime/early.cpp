// Programmatic dependent launches: a kernel that may start before the launch before it is over.
#include <algorithm>

#include "schedule.h"
#include "shadow.h"

namespace emu {

// Called before each launch of a run; `first` for that which no other of the run precedes. Before it may
// be another call: if it starts early, that may still use all but inputs, of which some are constant.
void start_launch_dependences(bool first, bool early) {
  for (Buffer& buffer : buffers) {
    Region& region = buffer.region;
    // A timeline is of one launch that was waited for: nobody asks for those of two at once.
    const bool timeline = buffer.name.rfind("crossfuse_timeline", 0) == 0;
    const bool shared = first && early && buffer.role != Role::kInput && !timeline;
    region.was_read = shared || (!first && (region.was_read || region.read));
    region.was_written = shared || (!first && (region.was_written || region.written));
    region.read = region.written = false;
  }
}

// An early launch touches nothing that a launch before may still write, and writes nothing that one
// may still read, before its thread has waited for them or met one that has. Who runs at the same time
// does not tell what launches before would still touch: there every access is looked at (races.h).
void check_dependence(Region& region, const Place& place, bool write, Site site) {
  (write ? region.written : region.read) = true;
  if (device.grids.size() > 1) return;
  if (!device.grid->launch.early || device.current->clock.launches) return;
  if (!region.was_written && !(write && region.was_read)) return;
  device.grid->touches = true;
  if (!is_news("early-launch", site, kNoSite)) return;
  report({"early-launch", place, site, kNoSite, current_cta(), current_thread(),
          format("%s what a launch before may still be %s: no griddepcontrol.wait comes before",
                 write ? "writes" : "reads", region.was_written ? "writing" : "reading")});
}

// The launch behind an early one waits for its end, which says nothing of launches before it if none of
// its threads has waited for them.
void check_waits(const Grid& grid) {
  if (!grid.launch.early || grid.waits || grid.touches) return;
  report({"early-launch", {}, kNoSite, kNoSite, -1, -1,
          format("%s has ended, and none of its threads has waited for the launch before: whoever waits for "
                 "its end does not know that what lies before it is over; griddepcontrol.wait in one thread "
                 "is enough",
                 grid.kernel->symbol)});
}

// The launch of the same stream at some distance in the order of all, or none: those of a stream follow
// one another.
const Grid* in_stream(const Grid& grid, int distance) {
  const size_t number = grid.number + distance;  // before the first one is beyond the last
  if (number >= device.grids.size()) return nullptr;
  const Grid* other = device.grids[number];
  return other->launch.stream == grid.launch.stream ? other : nullptr;
}

bool is_launch_over(const Grid& before, const Thread& now) {
  const Grid& own = *now.cta->cluster->grid;
  if (before.launch.stream != own.launch.stream) return false;
  return before.number < own.number && before.is_over() &&
         (now.clock.launches || !own.launch.early);
}

bool may_begin(const Grid& grid) {
  const Grid* before = in_stream(grid, -1);
  if (before == nullptr) return true;
  const auto own = device.grids.begin() + grid.number;
  auto is_over = [&](const Grid* each) {
    return each->launch.stream != grid.launch.stream || each->is_over();
  };
  if (!grid.launch.early) return std::all_of(device.grids.begin(), own, is_over);
  return before->begun && before->letting == before->clusters * before->launch.ctas();
}

void know_before(Thread& thread) {
  if (const Grid* before = in_stream(*thread.cta->cluster->grid, -1)) thread.clock.join(before->end);
}

void end_launch(Grid& grid) {
  check_waits(grid);
  // Who runs in other GPUs learns of it from launches behind this one. In one GPU their order is enough.
  if (device.streams) {
    if (const Grid* before = in_stream(grid, -1)) grid.end = before->end;
    for (const Cta& cta : ctas_of(grid)) {
      std::vector<Arrived> all;
      for (Thread* thread : cta.threads) all.push_back({thread, thread->clock, thread->time});
      grid.end.join(met_clock(all));
    }
  }
  const Grid* next = in_stream(grid, 1);
  if (next == nullptr) return;
  for (Thread& thread : device.grids[next->number]->threads) {
    if (thread.wait == Wait::kGrid) wake(thread);
  }
}

void let_next_begin(Cta& cta) {
  if (cta.lets_begin) return;
  cta.lets_begin = true;
  ++cta.cluster->grid->letting;
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_grid_wait() {
  using namespace emu;
  note_use(CROSSFUSE_SITE, true);
  Grid& grid = *device.grid;
  grid.waits = true;
  const Grid* before = in_stream(grid, -1);
  while (before != nullptr && !before->is_over()) block(Wait::kGrid, CROSSFUSE_SITE);
  know_before(*device.current);
  device.current->clock.launches = true;
}

void crossfuse_emulate_launch_dependents() {
  using namespace emu;
  let_next_begin(*device.current->cta);
  if (device.grids.size() > 1) pause(CROSSFUSE_SITE);
}
}
