// Who knows of whose accesses, by vector clocks: a thread counts its releases, an access carries the
// count, and whoever has learned of that count through barriers and flags comes after the access.
// Needed where more than barriers of CTAs and clusters orders anything: where all clusters of a
// launch run, and in kernels with mbarriers. In others the barriers are counted (races.h).
#pragma once
#include <cstdint>
#include <vector>

#include "times.h"

namespace emu {

struct Access;
struct Thread;

// Who makes an access: a thread, or what runs beside the thread that issued it, with a count of its own.
// In global memory these are loads and stores of copies, which read shared memory before they are over.
// What fills shared memory is counted by an mbarrier, and its count is the phase: loads of TMA, values
// pushed by threads, copies that pass from CTA to CTA.
enum class Agent : uint8_t { kThread, kLoads, kStores, kStoreReads, kFills, kPushes };
// Places beside threads, by which one knows that something is over: mbarriers and their phases,
// warpgroups and their products.
constexpr unsigned kMostBarriers = 64, kMostWarpgroups = 8;

struct Clock {
  Known known;      // comes before what follows, and what it wrote is visible
  Known over;       // comes before what follows, though what it wrote need not be visible yet:
                    // releases and acquires on the way may have scopes too narrow for that
  // Of that, what a proxy fence follows on the way, so that TMA and wgmma see it: one of global memory, one
  // of shared memory.
  Known visible, visible_shared;
  Known refreshed;  // what was known at the latest proxy fence of this cluster
  Known past;       // phases of mbarriers that have ended, though nothing need be visible through that
  bool launches = false;  // the launches before are over: known without clocks, too (early.cpp)
  void join(const Clock& other);
};

// Which threads a release or an acquire is about (PTX ISA, memory consistency model, scope).
enum class Scope : uint8_t { kCta, kCluster, kGpu, kSystem };

// What was published at a place (a flag, an mbarrier), by whom and for whom.
class Signal {
 public:
  void release(Scope scope);  // by the running thread: what it knows and has done
  void release(const Clock& clock, unsigned window, Scope scope);
  void acquire(Scope scope) const;  // by the running thread
  Clock of(Scope scope) const;      // what it would learn
  bool is_empty() const { return parts.empty(); }

 private:
  struct Part {
    unsigned window;
    Scope scope;
    Known known;
  };
  Clock all;  // but `known`
  std::vector<Part> parts;
};

// The running thread publishes what it knows and has done; or learns what was published.
void release_to(Clock& clock);
void acquire_from(const Clock& clock);
// What the running thread knew and had done when it came to a barrier of its CTA.
struct Arrived {
  Thread* thread;
  Clock clock;
  uint32_t time;
};
Arrived arrive_now(Thread& thread);
// These have met there: what each of them learns.
Clock met_clock(const std::vector<Arrived>& arrivals);
// The same of threads that wait, who learn it.
void meet_clocks(const std::vector<Thread*>& threads);
// Copies of a thread up to `number` are complete.
void complete_to(Clock& clock, const Thread& issuer, Agent agent, uint32_t number);
// A phase of an mbarrier is complete; products of a warpgroup of the running thread are.
Clock phase_clock(unsigned window, unsigned barrier, uint32_t phase);
// So many phases of it have ended, which is all that relaxed arrivals and waits, and copies, pass on.
Clock past_clock(unsigned window, unsigned barrier, uint32_t phase);
Clock past_of(const Clock& clock);
bool is_phase_past(unsigned window, unsigned barrier, uint32_t phase);
void products_done(uint32_t number);
// What the running thread would publish now; and whether it has learned all of that of another one.
struct Publication {
  Clock clock;
  const Thread* by = nullptr;
  uint32_t last_access = 0;
};
Publication publication_now();
bool knows_all(const Publication& published);
bool knows(const Clock& other);  // nothing of it is new
// What others had done before is over, though it need not be visible.
void know_over(const Clock& clock);
// What the running thread knows now is visible to the copies and products that it issues from now on:
// what lies in global memory, in shared memory.
void fence_clock(bool global, bool shared);

// What the running thread has done, or somebody of whom it knows: visible to it, or just over.
bool is_known(const Access& access, const Thread& now);
bool is_over(const Access& access, const Thread& now);
// Whether the running thread knows that copies of a group have read what they store.
bool are_reads_over(const Thread& issuer, uint32_t group);
bool are_products_over(unsigned window, unsigned warpgroup, uint32_t number);
// Whether a copy or a product issued by `now` sees what a known access wrote.
bool copy_sees(const Access& access, const Thread& now, bool shared);

}  // namespace emu
