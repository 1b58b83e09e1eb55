#include "clocks.h"

#include <algorithm>
#include <utility>

#include "shadow.h"
#include "state.h"

namespace emu {

namespace {
// Threads come first, which all count; then mbarriers and products, and last what few threads have:
// copies. What is known of a CTA ends early then, and most of the time goes into copying that.
constexpr size_t kCopies = static_cast<size_t>(Agent::kFills) - 1;  // agents that count by thread

size_t slot_of(Agent agent, unsigned index) {
  const size_t threads = device.grid->launch.threads();
  if (agent == Agent::kThread) return index;
  if (agent >= Agent::kFills) return threads + index;
  const size_t place = index * kCopies + static_cast<size_t>(agent) - 1;
  return threads + kMostBarriers + kMostWarpgroups + place;
}
size_t slot_of_products(unsigned warpgroup) {
  return size_t(device.grid->launch.threads()) + kMostBarriers + warpgroup;
}

// The same of what is visible and of what is over, which mostly are one.
void raise_both(Clock& clock, unsigned window, size_t slot, uint32_t time) {
  const bool one = clock.known == clock.over;
  clock.over = raised(clock.over, window, slot, time);
  clock.known = one ? clock.over : raised(clock.known, window, slot, time);
}

// The window of the CTA that made an access.
unsigned home_of(const Access& access) {
  return start_of(access).window + access.rank();
}

// The window and the place by which an access is known.
std::pair<unsigned, size_t> place_of(const Access& access) {
  auto agent = static_cast<Agent>(access.agent);
  if (agent >= Agent::kFills) {
    return {access.counted_in, slot_of(agent, access.counted_by)};
  }
  return {home_of(access), slot_of(agent, access.index())};
}

bool holds(const Known& known, unsigned window, size_t slot, uint32_t time) {
  if (time == 0) return true;
  const Times* times = times_of(known, window);
  return times && (*times)[slot] >= time;
}

bool holds(const Known& known, const Access& access) {
  auto [window, slot] = place_of(access);
  return holds(known, window, slot, access.time);
}

bool is_own(const Access& access, const Thread& now) {
  return access.agent == static_cast<unsigned>(Agent::kThread) && access.index() == now.index() &&
         home_of(access) == now.cta->window;
}

bool includes(Scope scope, const Cta& from, const Cta& to) {
  if (scope == Scope::kSystem) return true;
  const bool same_gpu = stream_of(from) == stream_of(to);
  return (scope == Scope::kGpu && same_gpu) || from.window == to.window ||
         (scope == Scope::kCluster && from.cluster == to.cluster);
}
}  // namespace

void Clock::join(const Clock& other) {
  const bool one = known == over && other.known == other.over;
  known = joined(known, other.known);
  over = one ? known : joined(over, other.over);
  visible = joined(visible, other.visible);
  visible_shared = joined(visible_shared, other.visible_shared);
  refreshed = joined(refreshed, other.refreshed);
  past = joined(past, other.past);
  launches |= other.launches;
}

void release_to(Clock& clock) {
  settle();
  Thread& self = *device.current;
  clock.launches |= self.clock.launches;
  if (!device.grid->launch.clocked) return;
  clock.join(self.clock);
  raise_both(clock, self.cta->window, slot_of(Agent::kThread, self.index()), self.time++);
}

void acquire_from(const Clock& clock) {
  Thread& self = *device.current;
  self.clock.launches |= clock.launches;
  if (device.grid->launch.clocked) self.clock.join(clock);
}

void Signal::release(const Clock& clock, unsigned window, Scope scope) {
  Clock rest = clock;
  rest.known = nullptr;
  all.join(rest);
  auto same = [&](const Part& part) { return part.window == window && part.scope == scope; };
  auto part = std::find_if(parts.begin(), parts.end(), same);
  if (part == parts.end()) part = parts.insert(part, {window, scope, nullptr});
  part->known = joined(part->known, clock.known);
}

void Signal::release(Scope scope) {
  Clock clock;
  release_to(clock);
  release(clock, device.current->cta->window, scope);
}

Clock Signal::of(Scope scope) const {
  const Cta& to = *device.current->cta;
  Clock clock = all;
  for (const Part& part : parts) {
    const Cta& from = device.ctas[part.window];
    if (!includes(part.scope, from, to) || !includes(scope, to, from)) continue;
    clock.known = joined(clock.known, part.known);
  }
  return clock;
}

void Signal::acquire(Scope scope) const { acquire_from(of(scope)); }

Arrived arrive_now(Thread& thread) {
  settle();
  if (!device.grid->launch.clocked) return {&thread, Clock(), 0};
  return {&thread, thread.clock, thread.time++};
}

Clock met_clock(const std::vector<Arrived>& arrivals) {
  Clock all;
  for (const Arrived& each : arrivals) all.join(each.clock);
  if (!device.grid->launch.clocked) return all;
  const unsigned window = arrivals[0].thread->cta->window;
  const bool one = all.known == all.over;
  for (Known* known : {&all.over, &all.known}) {
    if (one && known == &all.known) continue;
    Times* times = Times::make(device.grid->launch.threads(), times_of(*known, window));
    for (const Arrived& each : arrivals) {
      uint32_t& slot = times->at(slot_of(Agent::kThread, each.thread->index()));
      slot = std::max(slot, each.time);
    }
    *known = replaced(*known, window, times);
  }
  if (one) all.known = all.over;
  return all;
}

void meet_clocks(const std::vector<Thread*>& threads) {
  if (!device.grid->launch.clocked) {
    settle();
    bool launches = std::any_of(threads.begin(), threads.end(),
                                [](const Thread* thread) { return thread->clock.launches; });
    for (Thread* thread : threads) thread->clock.launches = launches;
    return;
  }
  std::vector<Arrived> arrivals;
  arrivals.reserve(threads.size());
  for (Thread* thread : threads) arrivals.push_back(arrive_now(*thread));
  const Clock all = met_clock(arrivals);
  for (Thread* thread : threads) thread->clock = all;
}

void complete_to(Clock& clock, const Thread& issuer, Agent agent, uint32_t number) {
  clock.launches |= issuer.clock.launches;
  if (!device.grid->launch.clocked) return;
  raise_both(clock, issuer.cta->window, slot_of(agent, issuer.index()), number);
}

Clock phase_clock(unsigned window, unsigned barrier, uint32_t phase) {
  Clock clock;
  if (!device.grid->launch.clocked || barrier >= kMostBarriers) return clock;
  raise_both(clock, window, slot_of(Agent::kFills, barrier), phase);
  return clock;
}

Clock past_clock(unsigned window, unsigned barrier, uint32_t phase) {
  Clock clock;
  if (!device.grid->launch.clocked || barrier >= kMostBarriers) return clock;
  clock.past = raised(nullptr, window, slot_of(Agent::kFills, barrier), phase);
  return clock;
}

Clock past_of(const Clock& clock) {
  Clock past;
  past.past = clock.past;
  return past;
}

bool is_phase_past(unsigned window, unsigned barrier, uint32_t phase) {
  if (!device.grid->launch.clocked || barrier >= kMostBarriers) return true;
  return holds(device.current->clock.past, window, slot_of(Agent::kFills, barrier), phase);
}

void products_done(uint32_t number) {
  if (!device.grid->launch.clocked) return;
  Thread& self = *device.current;
  const unsigned warpgroup = self.index() / kWarpgroup;
  raise_both(self.clock, self.cta->window, slot_of_products(warpgroup), number);
}

Publication publication_now() {
  const Thread& self = *device.current;
  return {self.clock, &self, self.last_access};
}

bool knows(const Clock& other) {
  const Clock& own = device.current->clock;
  const std::pair<const Known*, const Known*> parts[] = {
      {&own.known, &other.known},
      {&own.over, &other.over},
      {&own.visible, &other.visible},
      {&own.visible_shared, &other.visible_shared},
      {&own.refreshed, &other.refreshed}};
  for (const auto& [mine, theirs] : parts) {
    if (joined(*mine, *theirs) != *mine) return false;
  }
  return own.launches >= other.launches;
}

bool knows_all(const Publication& published) {
  if (!device.grid->launch.clocked || !published.by || !knows(published.clock)) return false;
  const size_t slot = slot_of(Agent::kThread, published.by->index());
  return holds(device.current->clock.known, published.by->cta->window, slot, published.last_access);
}

void know_over(const Clock& clock) {
  Clock over = clock;
  over.known = nullptr;
  acquire_from(over);
}

void fence_clock(bool global, bool shared) {
  settle();
  if (!device.grid->launch.clocked) return;
  Thread& self = *device.current;
  const size_t slot = slot_of(Agent::kThread, self.index());
  Known now = raised(self.clock.over, self.cta->window, slot, self.time++);
  if (shared) self.clock.visible_shared = joined(self.clock.visible_shared, now);
  if (!global) return;
  self.clock.visible = joined(self.clock.visible, now);
  self.clock.refreshed = now;
}

bool is_known(const Access& access, const Thread& now) {
  if (is_own(access, now)) return true;
  // What TMA brings may be waited for in the narrowest scope, whichever CTA has asked for it.
  const bool fill = access.agent == static_cast<unsigned>(Agent::kFills);
  return holds(fill ? now.clock.over : now.clock.known, access);
}

bool is_over(const Access& access, const Thread& now) {
  return is_own(access, now) || holds(now.clock.over, access);
}

bool are_products_over(unsigned window, unsigned warpgroup, uint32_t number) {
  return holds(device.current->clock.over, window, slot_of_products(warpgroup), number);
}

bool are_reads_over(const Thread& issuer, uint32_t group) {
  const size_t slot = slot_of(Agent::kStoreReads, issuer.index());
  return holds(device.current->clock.over, issuer.cta->window, slot, group);
}

bool copy_sees(const Access& access, const Thread& now, bool shared) {
  switch (static_cast<Agent>(access.agent)) {
    case Agent::kFills: return true;
    case Agent::kThread:
    case Agent::kPushes: return holds(shared ? now.clock.visible_shared : now.clock.visible, access);
    // Copies of one CTA use one proxy; those of others are seen through what was acquired.
    default: return home_of(access) == now.cta->window || holds(now.clock.refreshed, access);
  }
}

}  // namespace emu
