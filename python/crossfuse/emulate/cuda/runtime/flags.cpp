// Flags in global memory: words that CTAs of different clusters raise and poll.
#include <algorithm>

#include "async.h"
#include "schedule.h"
#include "shadow.h"

namespace emu {

namespace {
// Reads of a flag in a row, all unchanged, after which a thread sleeps until somebody changes it.
// More than one: a thread may well read again, elsewhere, what it has waited for already.
constexpr unsigned kPatience = 4;

bool has_changed(const Thread& thread) {
  return *static_cast<const volatile uint32_t*>(thread.flag) != thread.flag_value;
}

void poll(const uint32_t* flag, Site site) {
  Thread& self = *device.current;
  if (self.flag != flag || has_changed(self)) {
    pause(site);
  } else if (++self.polls < kPatience) {
    yield(site);
  } else {
    device.polling.push_back(&self);
    block(Wait::kFlag, site);
  }
  self.flag = flag;
}

// What threads that released a flag published.
std::map<const uint32_t*, Clock> flags;

void publish(const uint32_t* flag) {
  Clock& clock = flags[flag];
  release_to(clock);
  // A fence of this cluster does not put the copies of another one behind its acquire.
  clock.refreshed = nullptr;
}

bool releases(int order) { return order == CROSSFUSE_RELEASE || order == CROSSFUSE_ACQ_REL; }
bool acquires(int order) { return order == CROSSFUSE_ACQUIRE || order == CROSSFUSE_ACQ_REL; }
}  // namespace

std::string standing_at_flag(const Thread& thread) {
  Place place = global_place(thread.flag);
  if (place.argument < 0) return "polls a flag that lies in no buffer";
  const Buffer& buffer = buffers[place.argument];
  return format("polls the flag at byte %ld of %s, which stays %u", place.offset,
                buffer.name.c_str(), thread.flag_value);
}

void clear_flags() { flags.clear(); }

bool wake_pollers(bool forced) {
  std::vector<Thread*> polling;
  polling.swap(device.polling);
  for (Thread* thread : polling) {
    if (forced || has_changed(*thread)) {
      wake(*thread);
    } else {
      device.polling.push_back(thread);
    }
  }
  return device.polling.size() < polling.size();
}

}  // namespace emu

extern "C" {
unsigned crossfuse_emulate_flag_load(const void* flag, int order) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  const uint32_t* word = static_cast<const uint32_t*>(flag);
  poll(word, site);
  access(flag, 4, order == CROSSFUSE_WEAK ? Mode::kRead : Mode::kAtomicRead, site);
  if (acquires(order)) acquire_from(flags[word]);
  return device.current->flag_value = *word;
}

void crossfuse_emulate_flag_store(void* flag, unsigned value, int order) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  uint32_t* word = static_cast<uint32_t*>(flag);
  access(flag, 4, Mode::kAtomicWrite, site);
  flags[word] = Clock();
  if (releases(order)) publish(word);
  *word = value;
  pause(site);
}

unsigned crossfuse_emulate_flag_add(void* flag, unsigned value, int order) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  uint32_t* word = static_cast<uint32_t*>(flag);
  if (acquires(order)) acquire_from(flags[word]);
  access(flag, 4, Mode::kAtomic, site);
  if (releases(order)) publish(word);
  uint32_t old = *word;
  *word = old + value;
  pause(site);
  return old;
}
}
