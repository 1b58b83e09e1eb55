// Checks of one memory access: bounds, initialisation, races.
#pragma once
#include "findings.h"
#include "memory.h"

namespace emu {

// What an access does. Atomic ones, also the loads and stores of flags, do not race with each
// other.
enum class Mode : uint8_t { kRead, kWrite, kAtomic, kAtomicRead, kAtomicWrite };

// Who makes an access: the running thread, or a copy that it has issued.
struct Doer {
  Agent agent = Agent::kThread;
  uint32_t number = 0;  // of the copy
};
// The record of an access that is made now.
Access access_now(Mode mode, Site site, Doer doer = {});
// The cells of some bytes; they begin and end with these.
Cell* cells_at(Region& region, size_t offset, size_t bytes);
// An access by generated code to an ordinary address.
void access(const void* pointer, size_t bytes, Mode mode, Site site, Doer doer = {});
// Looks at what the thread has stored since, where that depends on what it has changed.
void settle();
// An access through the cluster window. False: the address is bad and must not be followed.
bool remote_access(Cta& target, size_t offset, size_t bytes, Mode mode, Site site);
// Of early launches (early.cpp).
void start_launch_dependences(bool first, bool early);
void check_waits(const Grid& grid);
// Whether the running thread knows that a launch before is over.
bool is_launch_over(const Grid& before, const Thread& now);
// Whether a launch of a chain may begin now. It is over: whoever waits for that goes on.
bool may_begin(const Grid& grid);
void end_launch(Grid& grid);
// A thread knows what launches before its own in its stream did.
void know_before(Thread& thread);
// A CTA is done, or says so: for its part the next launch may begin.
void let_next_begin(Cta& cta);
void check_dependence(Region& region, const Place& place, bool write, Site site);
// Notes that nothing wrote parts of an output.
void check_outputs();

}  // namespace emu
