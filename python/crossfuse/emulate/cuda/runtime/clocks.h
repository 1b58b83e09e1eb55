// Who knows of whose accesses to global memory, while all clusters of a launch run. Vector clocks:
// a thread counts its releases, an access carries the count, and whoever has learned of that count
// through barriers and flags comes after the access. Other launches need none of it: their clusters
// are never ordered, and the barriers within a cluster are counted (shadow.cpp).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace emu {

struct Access;
struct Thread;

// Copies run beside the thread that issued them, each kind with a count of its own.
enum class Agent : uint8_t { kThread, kLoads, kStores };
constexpr unsigned kAgents = 3;

// Counts of one CTA, agent by agent; and those of all CTAs by window. Null: nothing is known. They
// are shared rather than copied, because threads that met at a barrier know the same.
using Times = std::vector<uint32_t>;
using Knowledge = std::vector<std::shared_ptr<const Times>>;
using Known = std::shared_ptr<const Knowledge>;

struct Clock {
  Known known;      // comes before what follows
  Known visible;    // of that, what a proxy fence follows on the way: TMA sees ordinary stores
  Known refreshed;  // what was known at the latest proxy fence of this cluster
  bool launches = false;  // the launches before are over: known without clocks, too (early.cpp)
  void join(const Clock& other);
};

// The running thread publishes what it knows and has done; or learns what was published.
void release_to(Clock& clock);
void acquire_from(const Clock& clock);
// Threads of one CTA have met: each knows what all knew and did.
void meet_clocks(const std::vector<Thread*>& threads);
// Copies of a thread up to `number` are complete.
void complete_to(Clock& clock, const Thread& issuer, Agent agent, uint32_t number);
// What the running thread knows now is visible to the copies that it issues from now on.
void fence_clock();

bool is_known(const Access& access, const Thread& now);
// Whether a copy issued by `now` sees what a known access wrote.
bool copy_sees(const Access& access, const Thread& now);

}  // namespace emu
