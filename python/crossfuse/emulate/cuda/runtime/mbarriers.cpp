// Barriers in shared memory that count arrivals and bytes.
#include <map>
#include <utility>

#include "async.h"
#include "guarantees.h"
#include "races.h"
#include "schedule.h"

namespace emu {

namespace {
// An arrival: what it tells of copies and products, 0 once somebody has learned of that; and of all.
struct Told {
  Site site = kNoSite;
  uint64_t guarantee = 0;
  Publication published;
};
struct Mbarrier {
  uint64_t phase = 0;  // phases that are complete
  long expected = 0, pending = 0, bytes = 0;
  Site site = kNoSite;
  unsigned number = 0;      // among those of its CTA
  Signal arrived, released;  // what those who arrived published: so far, and until the last phase
  std::vector<Told> arrivals, last_arrivals;  // in this phase and in the last one
  bool counts = false, brought = false;  // bytes in this phase, and in the last one
  int sender = -1;          // and those of another CTA: its window
  struct {
    Site site = kNoSite;
    uint16_t thread = 0;
    size_t offset = 0;
    unsigned under_way = 0;
  } push;                   // values from other CTAs, and the latest of them
  uint64_t filled = 0;      // phases until the last such values had arrived
  uint64_t awaited = 0;     // phases that a thread of the CTA knows to be complete
  Access made;              // its initialisation
  int published = -1;       // cluster barriers its maker had arrived at before a fence behind that
  bool seen = false;        // by copies, too: a fence of its maker lies behind it
};
using Key = std::pair<unsigned, size_t>;  // window and offset
std::map<Key, Mbarrier> mbarriers;
std::map<unsigned, unsigned> counts;  // of them, by window

Mbarrier* find(unsigned window, size_t offset, Site site) {
  auto found = mbarriers.find({window, offset});
  if (found != mbarriers.end()) return &found->second;
  if (is_news("mbarrier", site, kNoSite)) {
    report({"mbarrier", shared_place(offset), site, kNoSite, current_cta(), current_thread(),
            "no barrier was initialised here"});
  }
  return nullptr;
}

// Whether the running thread comes after the initialisation. A fence makes it known through cluster
// barriers that order nothing else, too.
bool is_ready(const Mbarrier& barrier) {
  const Thread& self = *device.current;
  if (ordered(barrier.made, self, true)) return true;
  return barrier.published >= 0 && self.waited > barrier.published;
}

// The barrier at an address that the running thread uses; null if there is none.
Mbarrier* used(unsigned window, size_t offset, Site site) {
  Mbarrier* barrier = find(window, offset, site);
  if (!barrier || is_ready(*barrier) || !is_news("mbarrier", barrier->made.site, site)) {
    return barrier;
  }
  report({"mbarrier", shared_place(offset), barrier->made.site, site, current_cta(),
          current_thread(),
          format("%s initialises it, and nothing orders that before this use: no barrier lies "
                 "between, or a relaxed one without fence.mbarrier_init before it",
                 who(barrier->made).c_str())});
  return barrier;
}

void wake_waiting(const Key& key, const Mbarrier& barrier) {
  for (Thread* thread : device.ctas[key.first].threads) {
    bool waits = thread->wait == Wait::kPhase &&
                 (thread->barrier == key.second || thread->other == key.second);
    if (waits && (barrier.phase & 1) != thread->parity) wake(*thread);
  }
}

// What is past, whatever orders it: scopes do not matter.
void pass_on(Signal& signal, const Clock& past) { signal.release(past, 0, Scope::kGpu); }

void complete_if_due(const Key& key, Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  const auto phase = static_cast<uint32_t>(barrier.phase);
  if (barrier.counts) {
    const unsigned source = barrier.sender < 0 ? key.first : static_cast<unsigned>(barrier.sender);
    barrier.arrived.release(phase_clock(key.first, barrier.number, phase), source, Scope::kCluster);
  }
  pass_on(barrier.arrived, past_clock(key.first, barrier.number, phase));
  barrier.brought = std::exchange(barrier.counts, false);
  barrier.sender = -1;
  barrier.last_arrivals.swap(barrier.arrivals);
  barrier.arrivals.clear();
  barrier.released = barrier.arrived;
  wake_waiting(key, barrier);
}

// Whether the running thread learns from the last phase that it is over, or of anything that it brought.
bool tells_of_phase(const Mbarrier& barrier, unsigned window) {
  const auto phase = static_cast<uint32_t>(barrier.phase);
  if (!is_phase_past(window, barrier.number, phase)) return true;
  return barrier.brought && !knows(phase_clock(window, barrier.number, phase));
}

// Somebody goes on behind the last phase: a fresh barrier has none that is waited for.
void note_wait(Mbarrier& barrier, unsigned window, Site site) {
  if (!notes_uses()) return;
  note_use(site, barrier.phase > 0);
  if (barrier.phase > 0) note_use(barrier.made.site, true);
  note_news(site, tells_of_phase(barrier, window));
  for (Told& each : barrier.last_arrivals) {
    const bool news = !knows_all(each.published);
    note_use(each.site, true);
    note_guarantee(std::exchange(each.guarantee, 0));
    note_news(each.site, news);
    note_news(site, news);
  }
}

// Who arrives knows that the phase before is over, through whatever has waited for it: else the arrival
// may be counted there.
void check_phase(const Mbarrier& barrier, unsigned window, size_t offset, Site site) {
  const auto phase = static_cast<uint32_t>(barrier.phase);
  if (is_phase_past(window, barrier.number, phase) || !is_news("mbarrier", barrier.made.site, site)) {
    return;
  }
  report({"mbarrier", shared_place(offset), site, kNoSite, current_cta(), current_thread(),
          format("arrives in phase %u, and nothing says that the phase before is over: it may be counted "
                 "there",
                 phase)});
}

// A thread has been woken by the end of a phase. If the next one has ended, too, before it looks, a real
// thread, which knows of the parity alone, may wait on.
void check_not_missed(const Mbarrier& barrier, size_t offset, unsigned parity, Site site) {
  if ((barrier.phase & 1) != (parity & 1) || !is_news("mbarrier", barrier.site, site)) return;
  report({"mbarrier", shared_place(offset), barrier.site, site, current_cta(), current_thread(),
          format("phase %u that it waits for is over, and the next one is, too, before it has looked: it "
                 "may wait forever",
                 parity & 1)});
}

// A relaxed wait, of scope -1, tells of nothing but phases.
void learn(const Mbarrier& barrier, int scope) {
  if (scope >= 0) return barrier.released.acquire(static_cast<Scope>(scope));
  acquire_from(past_of(barrier.released.of(Scope::kCta)));
}

void arrive(unsigned address, unsigned count, unsigned bytes, int scope, Site site) {
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(address, window, offset)) return;
  note_peer(window, offset, site);
  Mbarrier* barrier = used(window, offset, site);
  if (!barrier) return;
  check_phase(*barrier, window, offset, site);
  barrier->site = site;
  note_use(site, false);
  barrier->arrivals.push_back({site, guarantee_of(*device.current), publication_now()});
  if (scope >= 0) barrier->arrived.release(static_cast<Scope>(scope));
  pass_on(barrier->arrived, past_of(device.current->clock));
  barrier->bytes += bytes;
  barrier->pending -= count;
  if (barrier->pending < 0 && is_news("mbarrier", site, kNoSite)) {
    report({"mbarrier", shared_place(offset), site, kNoSite, current_cta(), current_thread(),
            format("an arrival too many: this phase expects %ld", barrier->expected)});
    stop();
  }
  complete_if_due({window, offset}, *barrier);
  // Who arrives alone has ended the phase.
  const bool alone = barrier->expected == long(count) && bytes == 0 && barrier->phase > 0;
  if (!alone || barrier->pending != barrier->expected) return;
  acquire_from(past_clock(window, barrier->number, static_cast<uint32_t>(barrier->phase)));
}
}  // namespace

bool locate(unsigned address, unsigned& window, size_t& offset) {
  unsigned rank = address >> kWindowBits;
  offset = address & ((1u << kWindowBits) - 1);
  if (rank >= device.grid->launch.ctas()) return false;
  window = ranked(rank).window;
  return true;
}

void check_barrier(unsigned window, size_t offset, bool by_proxy, Site site) {
  const Mbarrier* barrier = used(window, offset, site);
  if (!barrier || !by_proxy || barrier->seen || copy_sees(barrier->made, *device.current, true)) return;
  if (!is_news("mbarrier", barrier->made.site, site)) return;
  report({"mbarrier", shared_place(offset), barrier->made.site, site, current_cta(),
          current_thread(),
          format("a copy completes it, which may not see that %s initialises it: no "
                 "fence.mbarrier_init and no fence.proxy.async lie between",
                 who(barrier->made).c_str())});
}

void count_by(unsigned window, size_t offset, Access& fill) {
  fill.counted_in = window;
  fill.counted_by = 0;
  fill.time = 0;  // known without a wait, if there is nothing to wait for or it has no number
  auto found = mbarriers.find({window, offset});
  if (found == mbarriers.end() || found->second.number >= kMostBarriers) return;
  fill.counted_by = found->second.number;
  fill.time = static_cast<uint32_t>(found->second.phase + 1);
}

void complete_bytes(unsigned window, size_t offset, long bytes, Site site, const Thread& issuer,
                    Agent agent, uint32_t number, const Clock& past) {
  Mbarrier* barrier = find(window, offset, site);
  if (!barrier) return;
  pass_on(barrier->arrived, past);
  barrier->counts = true;
  if (agent == Agent::kFills) {
    Clock loaded;
    complete_to(loaded, issuer, Agent::kLoads, number);
    barrier->arrived.release(loaded, window, Scope::kCta);
  } else if (issuer.cta->window != window) {
    barrier->sender = static_cast<int>(issuer.cta->window);
    barrier->filled = barrier->phase + 1;
    --barrier->push.under_way;
  }
  barrier->bytes -= bytes;
  complete_if_due({window, offset}, *barrier);
}

void note_push(unsigned window, size_t barrier, size_t offset, Site site) {
  const Thread& self = *device.current;
  auto found = mbarriers.find({window, barrier});
  if (found == mbarriers.end() || window == self.cta->window) return;
  note_started(device.ctas[window], offset, site);
  auto& push = found->second.push;
  push = {site, self.id, offset, push.under_way + 1};
}

void check_pushes_at_end(const Cluster& cluster) {
  for (auto& [key, barrier] : mbarriers) {
    const Cta& cta = device.ctas[key.first];
    if (cta.cluster != &cluster) continue;
    if (barrier.awaited >= barrier.filled && !barrier.push.under_way) continue;
    if (!is_news("early-exit", barrier.push.site, kNoSite)) continue;
    Access sender;
    sender.cluster = cluster.id;
    sender.thread = barrier.push.thread;
    report({"early-exit", shared_place(barrier.push.offset), barrier.push.site, kNoSite,
            static_cast<int>(cta.linear), -1,
            format("CTA %u (rank %u) may exit while what %s sends it is on its way: nobody waits for "
                   "the phase of the mbarrier that counts it",
                   cta.linear, cta.rank, who(sender).c_str())});
  }
}

void publish_barriers(bool to_cluster) {
  const Thread& self = *device.current;
  if (!self.makes_barriers) return;
  for (auto& [key, barrier] : mbarriers) {
    if (key.first != self.cta->window || barrier.made.thread != self.id) continue;
    barrier.seen = true;
    if (to_cluster && barrier.published < 0) barrier.published = self.arrived;
  }
}

bool is_past_barrier(const Thread& thread) {
  auto found = mbarriers.find({thread.cta->window, thread.barrier});
  return found != mbarriers.end() && (found->second.phase & 1) != thread.parity;
}

std::string standing_at_barrier(const Thread& thread) {
  const Mbarrier& barrier = mbarriers[{thread.cta->window, thread.barrier}];
  return format("waits for phase %u of the mbarrier at byte %zu, which lacks %ld arrivals and %ld "
                "bytes",
                thread.parity, thread.barrier - device.grid->arrays[0].offset, barrier.pending,
                barrier.bytes);
}

void check_barriers_at_end(const Cluster& cluster) {
  for (auto& [key, barrier] : mbarriers) {
    if (device.ctas[key.first].cluster != &cluster || barrier.bytes == 0) continue;
    if (!is_news("mbarrier", barrier.site, kNoSite)) continue;
    report({"mbarrier", shared_place(key.second), barrier.site, kNoSite,
            static_cast<int>(device.ctas[key.first].linear), -1,
            format("at the end %ld bytes are announced that did not arrive (or, below zero, arrived "
                   "without being announced)", barrier.bytes)});
  }
}

void clear_barriers() {
  mbarriers.clear();
  counts.clear();
}

namespace {
// Whether the first phase of a barrier is complete; if so, what was published by then is known.
bool passes(unsigned address, int scope, Site site, size_t& offset) {
  unsigned window = 0;
  if (!locate(address, window, offset)) return true;
  Mbarrier* barrier = used(window, offset, site);
  if (!barrier) return true;
  if ((barrier->phase & 1) == 0) return false;
  barrier->awaited = barrier->phase;
  note_wait(*barrier, window, site);
  learn(*barrier, scope);
  return true;
}
}  // namespace

}  // namespace emu

extern "C" {
void crossfuse_emulate_mbarrier_init(unsigned address, unsigned count) {
  unsigned window = 0;
  size_t offset = 0;
  if (!emu::locate(address, window, offset)) return;
  emu::note_use(CROSSFUSE_SITE, false);
  const bool anew = emu::mbarriers.count({window, offset}) == 0;
  emu::Mbarrier& barrier = emu::mbarriers[{window, offset}];
  const unsigned number = anew ? emu::counts[window]++ : barrier.number;
  barrier = emu::Mbarrier();
  barrier.number = number;
  emu::device.current->makes_barriers = true;
  barrier.expected = barrier.pending = count;
  barrier.made = emu::access_now(emu::Mode::kWrite, CROSSFUSE_SITE);
}

void crossfuse_emulate_fence_initialised() {
  emu::note_use(CROSSFUSE_SITE, true);
  emu::publish_barriers(true);
}

void crossfuse_emulate_mbarrier_arrive(unsigned address, unsigned count, unsigned bytes,
                                       int scope) {
  emu::arrive(address, count, bytes, scope, CROSSFUSE_SITE);
  emu::pause(CROSSFUSE_SITE);
}

void crossfuse_emulate_mbarrier_wait(unsigned address, unsigned parity, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(address, window, offset)) return;
  Mbarrier* barrier = used(window, offset, site);
  if (!barrier) return;
  if ((barrier->phase & 1) == (parity & 1)) {
    Thread& self = *device.current;
    self.barrier = offset;
    self.other = kNoBarrier;
    self.parity = parity & 1;
    block(Wait::kPhase, site);
    check_not_missed(*barrier, offset, parity, site);
  }
  barrier->awaited = barrier->phase;
  note_wait(*barrier, window, site);
  learn(*barrier, scope);
}

unsigned crossfuse_emulate_mbarrier_test(unsigned address, int scope) {
  size_t offset = 0;
  return emu::passes(address, scope, CROSSFUSE_SITE, offset);
}

unsigned crossfuse_emulate_mbarrier_try(unsigned address, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  Thread& self = *device.current;
  if (passes(address, scope, site, self.barrier)) return 1;
  self.parity = 0;
  device.polling.push_back(&self);
  block(Wait::kLook, site);
  return passes(address, scope, site, self.barrier);
}

unsigned crossfuse_emulate_mbarrier_either(unsigned address, unsigned other, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  Thread& self = *device.current;
  while (true) {
    if (passes(address, scope, site, self.barrier)) return 0;
    if (passes(other, scope, site, self.other)) return 1;
    self.parity = 0;
    block(Wait::kPhase, site);
  }
}
}
