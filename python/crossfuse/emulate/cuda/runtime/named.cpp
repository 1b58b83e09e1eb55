// Barriers of some threads of a CTA, by number.
#include <algorithm>
#include <map>

#include "async.h"
#include "findings.h"
#include "guarantees.h"
#include "schedule.h"

namespace emu {

namespace {
// A thread at a named barrier, and what it knew and had done when it came. Who does not wait goes
// on, and what it does then is not what others learn of.
struct Arrival {
  Arrived self;
  bool waits;
  uint32_t epoch;
  uint16_t acquired;
  Shared met;
};
struct NamedBarrier {
  std::vector<Arrival> arrivals;
};
std::map<std::pair<unsigned, unsigned>, NamedBarrier> named;

// What any of them knew, and what all of them had done.
Shared joined(const std::vector<Arrival>& arrivals) {
  Shared known;
  for (const Arrival& each : arrivals) known = joined(known, each.met);
  Times* all = Times::make(device.grid->launch.threads(), known.get());
  for (const Arrival& each : arrivals) {
    uint32_t& slot = all->at(each.self.thread->index());
    slot = std::max(slot, each.epoch);
  }
  return all;
}

void complete(const std::vector<Arrival>& arrivals) {
  auto all = joined(arrivals);
  uint16_t acquired = 0;
  std::vector<Arrived> selves;
  for (const Arrival& each : arrivals) {
    acquired = std::max(acquired, each.acquired);
    selves.push_back(each.self);
  }
  const Clock clock = met_clock(selves);
  for (const Arrival& each : arrivals) {
    if (!each.waits) continue;
    Thread* thread = each.self.thread;
    thread->acquired = acquired;
    thread->met = all;
    thread->clock = clock;
    if (thread != device.current) wake(*thread);
  }
}

// A thread that does not wait may come again before the others have come: then it counts for them. It
// may well wait itself for the rest of what it has begun: turns are given away like that.
void check_arrives_once(const NamedBarrier& barrier, unsigned id, Site site) {
  auto self = std::find_if(barrier.arrivals.begin(), barrier.arrivals.end(),
                           [](const Arrival& e) { return e.self.thread == device.current; });
  if (self == barrier.arrivals.end() || !is_news("barrier-divergence", site, kNoSite)) return;
  report({"barrier-divergence", {}, site, kNoSite, current_cta(), current_thread(),
          format("a thread arrives twice at named barrier %u before the others have come", id)});
}

// Whether the barrier has to wait for more threads.
bool arrive(unsigned id, unsigned threads, bool waits, Site site) {
  Thread& self = *device.current;
  NamedBarrier& barrier = named[{self.cta->window, id}];
  note_use(site, true);
  note_guarantee(guarantee_of(self));
  if (!waits) check_arrives_once(barrier, id, site);
  barrier.arrivals.push_back({arrive_now(self), waits, ++self.warp_epoch, self.acquired, self.met});
  if (barrier.arrivals.size() < threads) return true;
  std::vector<Arrival> arrivals;
  arrivals.swap(barrier.arrivals);
  complete(arrivals);
  return false;
}
}  // namespace

void clear_named_barriers() { named.clear(); }

}  // namespace emu

extern "C" {
void crossfuse_emulate_named_barrier(unsigned id, unsigned threads) {
  using namespace emu;
  if (arrive(id, threads, true, CROSSFUSE_SITE)) block(Wait::kNamed, CROSSFUSE_SITE);
}

void crossfuse_emulate_named_arrive(unsigned id, unsigned threads) {
  emu::arrive(id, threads, false, CROSSFUSE_SITE);
}
}
