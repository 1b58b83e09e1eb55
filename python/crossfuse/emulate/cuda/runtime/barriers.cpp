// CTA barriers, cluster barriers, and the explanation when nothing can run.
#include <algorithm>

#include "async.h"
#include "findings.h"
#include "guarantees.h"
#include "memory.h"
#include "schedule.h"

namespace emu {

namespace {

// Two sites may be copies of one statement made by the C++ compiler; whoever reads the report
// compares statements and drops those.
void check_same_statement(const Thread& other, Site before, Site now, const char* what) {
  if (before == now || !is_news("barrier-statement", before, now)) return;
  report({"barrier-statement", {}, before, now, current_cta(), current_thread(),
          format("thread %u and thread %d of CTA %d meet at different %s statements",
                 other.index(), current_thread(), current_cta(), what)});
}

// Whether some threads know of other CTAs or launches what others of this one do not.
bool passes_on(const Cta& cta) {
  const Thread& first = *cta.threads[0];
  return std::any_of(cta.threads.begin(), cta.threads.end(), [&](const Thread* each) {
    return each->acquired != first.acquired || each->clock.launches != first.clock.launches;
  });
}

void cta_barrier(Site site) {
  Thread& self = *device.current;
  Cta& cta = *self.cta;
  note_guarantee(guarantee_of(self));
  self.cta_barrier = site;
  if (++cta.at_barrier < cta.threads.size()) return block(Wait::kCta, site);
  cta.at_barrier = 0;
  note_use(site, device.grid->launch.clocked || passes_on(cta));
  meet_clocks(cta.threads);
  uint16_t acquired = 0;
  for (const Thread* thread : cta.threads) {
    acquired = std::max(acquired, thread->acquired);
    if (thread != &self) check_same_statement(*thread, thread->wait_site, site, "__syncthreads");
  }
  for (Thread* thread : cta.threads) {
    thread->acquired = acquired;
    ++thread->cta_epoch;
    if (thread != &self) wake(*thread);
  }
}

void pass_cluster_barrier(Thread& thread) {
  ++thread.waited;
  const Cluster& cluster = *thread.cta->cluster;
  const Clock& released = cluster.released[thread.waited];
  thread.clock.launches |= released.launches;
  if (device.grid->launch.clocked) thread.clock.join(released);
  if (!cluster.relaxed[thread.waited]) thread.acquired = std::max(thread.acquired, thread.waited);
}

// Who arrives relaxed publishes nothing; where one does, the count of barriers orders no memory.
void cluster_arrive(bool relaxed, Site site) {
  Thread& self = *device.current;
  if (self.arrived > self.waited && is_news("barrier-divergence", site, kNoSite)) {
    report({"barrier-divergence", {}, site, kNoSite, current_cta(), current_thread(),
            "a thread arrives twice at the cluster barrier without waiting in between"});
  }
  note_use(site, true);
  note_guarantee(guarantee_of(self));
  uint16_t phase = ++self.arrived;
  Cluster& cluster = *self.cta->cluster;
  if (cluster.arrivals.size() <= phase) {
    cluster.arrivals.resize(phase + 1, 0);
    cluster.released.resize(phase + 1);
    cluster.relaxed.resize(phase + 1, false);
  }
  if (relaxed) {
    cluster.relaxed[phase] = true;
    self.relaxed.push_back(phase);
    cluster.released[phase].join(past_of(self.clock));
  } else {
    release_to(cluster.released[phase]);
  }
  Warp& warp = *self.warp;
  if (warp.cluster_phase == phase) {
    check_same_statement(*warp.cluster_thread, warp.cluster_site, site, "cluster barrier");
  }
  warp.cluster_thread = &self;
  warp.cluster_phase = phase;
  warp.cluster_site = site;
  if (++cluster.arrivals[phase] < device.grid->launch.ctas() * device.grid->launch.threads()) return;
  for (Cta& cta : ctas_of(cluster)) {
    for (Thread* thread : cta.threads) {
      if (thread->wait == Wait::kCluster && thread->waited + 1 == phase) {
        pass_cluster_barrier(*thread);
        wake(*thread);
      }
    }
  }
}

void cluster_wait(Site site) {
  Thread& self = *device.current;
  note_use(site, true);
  uint16_t phase = self.waited + 1;
  const std::vector<unsigned>& arrivals = self.cta->cluster->arrivals;
  bool complete = phase < arrivals.size() &&
                  arrivals[phase] == device.grid->launch.ctas() * device.grid->launch.threads();
  if (complete) return pass_cluster_barrier(self);
  block(Wait::kCluster, site);
}

// What a thread does while nothing can run, as words and as a key to compare by.
std::string standing(const Thread& thread) {
  const Turn turn(*thread.cta->cluster);
  switch (thread.wait) {
    case Wait::kFinished: return "has finished";
    case Wait::kCta: return format("waits at __syncthreads number %u", thread.cta_epoch + 1);
    case Wait::kCluster: return format("waits at cluster barrier number %u", thread.waited + 1);
    case Wait::kPhase:
    case Wait::kLook: return standing_at_barrier(thread);
    case Wait::kNamed: return "waits at a named barrier";
    case Wait::kCopies: return "waits for its copies";
    case Wait::kGrid: return "waits for the launch before";
    case Wait::kProducts: return "waits for its warpgroup to issue a product";
    case Wait::kFlag: return standing_at_flag(thread);
    default: return "waits at a warp-wide operation";
  }
}

const Thread* differing(const Cta& cta, const Thread*& waiting) {
  waiting = nullptr;
  for (const Thread* thread : cta.threads) {
    if (thread->wait != Wait::kFinished) waiting = thread;
  }
  if (!waiting) return nullptr;
  for (const Thread* thread : cta.threads) {
    if (standing(*thread) != standing(*waiting)) return thread;
  }
  return nullptr;
}

Site standing_site(const Thread& thread) {
  return thread.wait == Wait::kFinished ? kNoSite : thread.wait_site;
}

void report_divergence(const Cta& cta, const Thread& waiting, const Thread& other) {
  report({"barrier-divergence", {}, waiting.wait_site, standing_site(other),
          static_cast<int>(cta.linear), static_cast<int>(waiting.index()),
          format("thread %u %s, while thread %u of the same CTA %s",
                 waiting.index(), standing(waiting).c_str(),
                 other.index(), standing(other).c_str())});
}

// Ranks tell the CTAs of one cluster apart; with several clusters it takes the place in the grid.
std::string name_of(const Cta& cta) {
  if (device.clusters.size() == 1) return format("CTA rank %u", cta.rank);
  return format("CTA %u", cta.linear);
}

// Roles of a pipeline wait for different things; what each lacks tells the story, flags first.
bool report_pipeline() {
  std::vector<const Thread*> waiting;
  for (const Cta& cta : device.ctas) {
    for (const Thread* thread : cta.threads) {
      if (thread->wait != Wait::kFinished) waiting.push_back(thread);
    }
  }
  std::stable_partition(waiting.begin(), waiting.end(),
                        [](const Thread* thread) { return thread->wait == Wait::kFlag; });
  std::vector<std::string> told;
  bool pipeline = false;
  std::string detail;
  for (const Thread* thread : waiting) {
    pipeline |= thread->wait == Wait::kPhase || thread->wait == Wait::kProducts ||
                thread->wait == Wait::kFlag;
    std::string line = name_of(*thread->cta) + " " + standing(*thread);
    if (std::find(told.begin(), told.end(), line) != told.end()) continue;
    told.push_back(line);
    if (told.size() > 4) continue;
    detail += format("%sthread %u of ", told.size() > 1 ? "; " : "", thread->index()) + line;
  }
  if (!pipeline) return false;
  const Thread* first = waiting[0];
  Place place;
  if (first->wait == Wait::kFlag) place = global_place(first->flag);
  report({"deadlock", place, first->wait_site, kNoSite, static_cast<int>(first->cta->linear),
          static_cast<int>(first->index()), detail});
  return true;
}

void report_deadlock() {
  const Thread* waiting = nullptr;
  for (const Cta& cta : device.ctas) {
    for (const Thread* thread : cta.threads) {
      if (thread->wait != Wait::kFinished && !waiting) waiting = thread;
    }
  }
  const Thread* other = nullptr;
  for (const Cta& cta : device.ctas) {
    if (standing(*cta.threads[0]) != standing(*waiting)) other = cta.threads[0];
  }
  std::string detail = name_of(*waiting->cta) + " " + standing(*waiting);
  if (other) {
    detail += format(", while %s %s after arriving at %u", name_of(*other->cta).c_str(),
                     standing(*other).c_str(), other->arrived);
  }
  report({"deadlock", {}, waiting->wait_site, other ? standing_site(*other) : kNoSite,
          static_cast<int>(waiting->cta->linear),
          static_cast<int>(waiting->index()), detail});
}

}  // namespace

void explain_standstill() {
  if (report_pipeline()) stop();
  bool diverged = false;
  for (const Cta& cta : device.ctas) {
    const Thread* waiting = nullptr;
    const Thread* other = differing(cta, waiting);
    if (!other) continue;
    // One CTA tells the story; the others usually repeat it.
    if (!diverged) report_divergence(cta, *waiting, *other);
    diverged = true;
  }
  if (!diverged) report_deadlock();
  stop();
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_cta_barrier() { emu::cta_barrier(CROSSFUSE_SITE); }
void crossfuse_emulate_cluster_arrive(int relaxed) { emu::cluster_arrive(relaxed, CROSSFUSE_SITE); }
void crossfuse_emulate_cluster_wait() { emu::cluster_wait(CROSSFUSE_SITE); }
}
