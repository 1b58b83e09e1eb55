#include "clocks.h"

#include <algorithm>

#include "shadow.h"
#include "state.h"

namespace emu {

namespace {
using Shared = std::shared_ptr<const Times>;

bool covers(const Times& a, const Times& b) {
  bool all = true;
  for (size_t i = 0; i < a.size(); ++i) all &= a[i] >= b[i];
  return all;
}

// What was joined lately. Threads that met know the same and learn the same next, each by itself:
// one of them does the work, and all go on with one result, which later joins see at once. Entries
// keep what they were made of, so no address among them is reused.
template <class Counts>
class Recent {
 public:
  template <class Join>
  const Counts& joined(const Counts& a, const Counts& b, Join join) {
    size_t place = reinterpret_cast<uintptr_t>(a.get()) / 16 * 31 +
                   reinterpret_cast<uintptr_t>(b.get()) / 16;
    Entry& entry = entries[place % kEntries];
    if (entry.a != a || entry.b != b) entry = {a, b, join(a, b)};
    return entry.both;
  }

 private:
  static constexpr size_t kEntries = 61;
  struct Entry {
    Counts a, b, both;
  };
  Entry entries[kEntries];
};

Shared joined_anew(const Shared& a, const Shared& b) {
  if (covers(*a, *b)) return a;
  if (covers(*b, *a)) return b;
  auto both = std::make_shared<Times>(*a);
  for (size_t i = 0; i < both->size(); ++i) (*both)[i] = std::max((*a)[i], (*b)[i]);
  return both;
}

Shared joined(const Shared& a, const Shared& b) {
  static Recent<Shared> recent;
  if (!b || a == b) return a;
  if (!a) return b;
  return recent.joined(a, b, [](const Shared& x, const Shared& y) { return joined_anew(x, y); });
}

Known joined_anew(const Known& a, const Known& b) {
  auto both = std::make_shared<Knowledge>(a->size());
  bool is_a = true, is_b = true;
  for (size_t i = 0; i < a->size(); ++i) {
    Shared& each = (*both)[i];
    each = joined((*a)[i], (*b)[i]);
    is_a &= each == (*a)[i];
    is_b &= each == (*b)[i];
  }
  return is_a ? a : is_b ? b : both;
}

Known joined(const Known& a, const Known& b) {
  static Recent<Known> recent;
  if (!b || a == b) return a;
  if (!a) return b;
  return recent.joined(a, b, [](const Known& x, const Known& y) { return joined_anew(x, y); });
}

size_t slot_of(Agent agent, unsigned index) {
  return static_cast<size_t>(agent) * device.launch.threads() + index;
}

// A copy of the counts of one CTA, to be changed before they are shared.
std::shared_ptr<Times> times_of(const Known& known, unsigned window) {
  if (known && (*known)[window]) return std::make_shared<Times>(*(*known)[window]);
  return std::make_shared<Times>(kAgents * device.launch.threads(), 0);
}

Known replaced(const Known& known, unsigned window, Shared times) {
  auto all = known ? std::make_shared<Knowledge>(*known)
                   : std::make_shared<Knowledge>(device.ctas.size());
  (*all)[window] = std::move(times);
  return all;
}

Known raised(const Known& known, const Thread& thread, Agent agent, uint32_t time) {
  auto times = times_of(known, thread.cta->window);
  uint32_t& slot = (*times)[slot_of(agent, thread.index())];
  slot = std::max(slot, time);
  return replaced(known, thread.cta->window, times);
}

// The window of the CTA that made an access.
unsigned home_of(const Access& access) {
  return (access.cluster - device.first_cluster) * device.launch.ctas() + access.rank();
}

bool holds(const Known& known, const Access& access) {
  if (!known) return false;
  const Shared& times = (*known)[home_of(access)];
  auto agent = static_cast<Agent>(access.agent);
  return times && (*times)[slot_of(agent, access.index())] >= access.time;
}
}  // namespace

void Clock::join(const Clock& other) {
  known = joined(known, other.known);
  visible = joined(visible, other.visible);
  refreshed = joined(refreshed, other.refreshed);
  launches |= other.launches;
}

void release_to(Clock& clock) {
  settle();
  Thread& self = *device.current;
  clock.launches |= self.clock.launches;
  if (!device.launch.cooperative) return;
  clock.join(self.clock);
  clock.known = raised(clock.known, self, Agent::kThread, self.time++);
}

void acquire_from(const Clock& clock) {
  Thread& self = *device.current;
  self.clock.launches |= clock.launches;
  if (device.launch.cooperative) self.clock.join(clock);
}

void meet_clocks(const std::vector<Thread*>& threads) {
  settle();
  bool launches = std::any_of(threads.begin(), threads.end(),
                              [](const Thread* thread) { return thread->clock.launches; });
  for (Thread* thread : threads) thread->clock.launches = launches;
  if (!device.launch.cooperative) return;
  Clock all;
  for (const Thread* thread : threads) all.join(thread->clock);
  unsigned window = threads[0]->cta->window;
  auto times = times_of(all.known, window);
  for (Thread* thread : threads) {
    (*times)[slot_of(Agent::kThread, thread->index())] = thread->time++;
  }
  all.known = replaced(all.known, window, times);
  for (Thread* thread : threads) thread->clock = all;
}

void complete_to(Clock& clock, const Thread& issuer, Agent agent, uint32_t number) {
  clock.launches |= issuer.clock.launches;
  if (device.launch.cooperative) clock.known = raised(clock.known, issuer, agent, number);
}

void fence_clock() {
  settle();
  if (!device.launch.cooperative) return;
  Thread& self = *device.current;
  Known now = raised(self.clock.known, self, Agent::kThread, self.time++);
  self.clock.visible = joined(self.clock.visible, now);
  self.clock.refreshed = now;
}

bool is_known(const Access& access, const Thread& now) {
  bool own = home_of(access) == now.cta->window && access.index() == now.index();
  if (own && access.agent == static_cast<unsigned>(Agent::kThread)) return true;
  return holds(now.clock.known, access);
}

bool copy_sees(const Access& access, const Thread& now) {
  if (access.agent == static_cast<unsigned>(Agent::kThread)) {
    return holds(now.clock.visible, access);
  }
  // Copies of one CTA use one proxy; those of others are seen through what was acquired.
  return home_of(access) == now.cta->window || holds(now.clock.refreshed, access);
}

}  // namespace emu
