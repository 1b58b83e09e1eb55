// Flags in global memory: words that CTAs of different clusters raise and poll.
#include <algorithm>

#include "async.h"
#include "guarantees.h"
#include "schedule.h"
#include "shadow.h"

namespace emu {

namespace {
// Reads of a flag in a row, all unchanged, after which a thread sleeps until somebody changes it.
// More than one: a thread may well read again, elsewhere, what it has waited for already.
constexpr unsigned kPatience = 4;

bool has_changed(const Thread& thread) {
  if (thread.wait == Wait::kLook) return is_past_barrier(thread);
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

// What threads of a launch that released a flag published; or of all launches, where some run in other GPUs.
std::map<std::pair<unsigned, const void*>, Signal> flags;
std::pair<unsigned, const void*> key_of(const void* flag) {
  return {device.streams ? 0 : device.grid->number, flag};
}

Clock published() {
  Clock clock;
  note_guarantee(guarantee_of(*device.current));
  release_to(clock);
  // A proxy fence of this cluster does not put the copies of another one behind its acquire.
  clock.refreshed = nullptr;
  return clock;
}

void read_flag(const uint32_t* flag, int order, int scope) {
  if (order == CROSSFUSE_ACQUIRE || order == CROSSFUSE_ACQ_REL) {
    flags[key_of(flag)].acquire(static_cast<Scope>(scope));
  }
  if (order != CROSSFUSE_WEAK) relaxed_read(flag);
}

void write_flag(const uint32_t* flag, int order, int scope) {
  if (order == CROSSFUSE_RELEASE || order == CROSSFUSE_ACQ_REL) {
    flags[key_of(flag)].release(published(), device.current->cta->window, static_cast<Scope>(scope));
  }
  relaxed_write(flag);
}
}  // namespace

std::string standing_at_flag(const Thread& thread) {
  Place place = global_place(thread.flag);
  if (place.argument < 0) return "polls a flag that lies in no buffer";
  const Buffer& buffer = buffers[place.argument];
  return format("polls the flag at byte %ld of %s, which stays %u", place.offset,
                buffer.name.c_str(), thread.flag_value);
}

void clear_flags() { flags.clear(); }

void relaxed_read(const void* flag) {
  if (!device.grid->launch.cooperative) return;
  auto found = flags.find(key_of(flag));
  if (found != flags.end()) device.current->before_fence.join(found->second.of(Scope::kGpu));
}

void relaxed_write(const void* flag) {
  const Thread& self = *device.current;
  if (self.behind_fence.known) flags[key_of(flag)].release(self.behind_fence, self.cta->window, Scope::kGpu);
}

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

void wake_voters() {
  std::vector<Thread*> polling;
  polling.swap(device.polling);
  for (Thread* thread : polling) {
    const std::vector<Thread*>& lanes = thread->warp->lanes;
    bool awaited = std::any_of(lanes.begin(), lanes.end(),
                               [](const Thread* lane) { return lane->wait == Wait::kWarp; });
    if (awaited) {
      wake(*thread);
    } else {
      device.polling.push_back(thread);
    }
  }
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_fence_memory() {
  using namespace emu;
  Thread& self = *device.current;
  acquire_from(self.before_fence);
  self.behind_fence = published();
}

unsigned crossfuse_emulate_flag_load(const void* flag, int order, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  const uint32_t* word = static_cast<const uint32_t*>(flag);
  note_use(site, true);
  poll(word, site);
  access(flag, 4, order == CROSSFUSE_WEAK ? Mode::kRead : Mode::kAtomicRead, site);
  read_flag(word, order, scope);
  return device.current->flag_value = *word;
}

void crossfuse_emulate_flag_store(void* flag, unsigned value, int order, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  uint32_t* word = static_cast<uint32_t*>(flag);
  access(flag, 4, Mode::kAtomicWrite, site);
  flags[key_of(word)] = Signal();
  write_flag(word, order, scope);
  *word = value;
  pause(site);
}

unsigned crossfuse_emulate_flag_add(void* flag, unsigned value, int order, int scope) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  uint32_t* word = static_cast<uint32_t*>(flag);
  note_use(site, true);
  read_flag(word, order, scope);
  access(flag, 4, Mode::kAtomic, site);
  write_flag(word, order, scope);
  uint32_t old = *word;
  *word = old + value;
  pause(site);
  return old;
}
}
