// Programmatic dependent launches: a kernel that may start before the launch before it is over.
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
// may still read, before its thread has waited for them or met one that has.
void check_dependence(Region& region, const Place& place, bool write, Site site) {
  (write ? region.written : region.read) = true;
  if (!device.launch.early || device.current->clock.launches) return;
  if (!region.was_written && !(write && region.was_read)) return;
  if (!is_news("early-launch", site, kNoSite)) return;
  report({"early-launch", place, site, kNoSite, current_cta(), current_thread(),
          format("%s what a launch before may still be %s: no griddepcontrol.wait comes before",
                 write ? "writes" : "reads", region.was_written ? "writing" : "reading")});
}

}  // namespace emu

extern "C" void crossfuse_emulate_grid_wait() {
  emu::note_use(CROSSFUSE_SITE, true);
  emu::device.current->clock.launches = true;
}
