// Named barriers, matrices stored by a warp, and what passes between ordinary accesses and those of
// TMA and wgmma: stores that these can see, and loads that are over before a copy comes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "async.h"
#include "schedule.h"
#include "shadow.h"

namespace emu {

namespace {
// Of each word of shared memory: what became of the last ordinary store to it.
enum Visibility : uint8_t { kUntouched, kStored, kFenced, kVisible };
static_assert(kUntouched == 0 && kVisible == 3, "the states of which both bits are equal");
std::map<unsigned, std::vector<uint8_t>> visibility;  // by window

std::vector<uint8_t>& words_of(unsigned window) {
  std::vector<uint8_t>& words = visibility[window];
  words.resize(device.shared_end / 4 + 1, kUntouched);
  return words;
}

// Of each word of shared memory: who read it last by an ordinary load, and how many proxy fences
// that thread had behind it then.
struct LastLoad {
  const Thread* thread = nullptr;
  uint32_t fences = 0;
  Site site = kNoSite;
};
std::map<unsigned, std::vector<LastLoad>> loads;  // by window

std::vector<LastLoad>& loads_of(unsigned window) {
  std::vector<LastLoad>& words = loads[window];
  words.resize(device.shared_end / 4 + 1);
  return words;
}

void raise(Thread& thread, std::vector<std::pair<size_t, size_t>>& stores, Visibility from,
           Visibility to) {
  std::vector<uint8_t>& words = words_of(thread.cta->window);
  for (auto [begin, end] : stores) {
    for (size_t word = begin / 4; word < (end + 3) / 4; ++word) {
      if (words[word] == from) words[word] = to;
    }
  }
}

// An ordinary store to a place that a shared address means.
void store_words(unsigned window, size_t offset, const void* values, size_t bytes, Site site) {
  check_store(window, offset, bytes, site);
  if (!remote_access(device.ctas[window], offset, bytes, Mode::kWrite, site)) return;
  memcpy(window_of(window) + offset, values, bytes);
  note_generic_store(offset, bytes);
}

// Whether a reader sees all of eight words: every thread of a warpgroup looks at all words of both
// tiles of every product, and almost always all is well.
bool are_visible(const uint8_t* words, bool to_copies) {
  constexpr uint64_t kEach = 0x0101010101010101;
  uint64_t eight;
  memcpy(&eight, words, sizeof eight);
  return to_copies ? eight == kVisible * kEach : ((eight ^ eight >> 1) & kEach) == 0;
}

// A thread at a named barrier, and what it knew and had done when it came. Who does not wait goes
// on, and what it does then is not what others learn of.
struct Arrival {
  Thread* thread;
  bool waits;
  uint32_t epoch;
  uint16_t acquired;
  std::shared_ptr<const Times> met;
  std::vector<std::pair<size_t, size_t>> fenced;
};
struct NamedBarrier {
  std::vector<Arrival> arrivals;
};
std::map<std::pair<unsigned, unsigned>, NamedBarrier> named;

// What any of them knew, and what all of them had done.
std::shared_ptr<const Times> joined(const std::vector<Arrival>& arrivals) {
  auto all = std::make_shared<Times>(device.launch.threads(), 0);
  const Times* last = nullptr;
  for (const Arrival& each : arrivals) {
    const Times* met = each.met.get();
    if (!met || met == last) continue;
    last = met;  // mostly that of all, since they met before
    for (size_t i = 0; i < all->size(); ++i) (*all)[i] = std::max((*all)[i], (*met)[i]);
  }
  for (const Arrival& each : arrivals) {
    uint32_t& known = (*all)[each.thread->index()];
    known = std::max(known, each.epoch);
  }
  return all;
}

void complete(std::vector<Arrival> arrivals) {
  auto all = joined(arrivals);
  uint16_t acquired = 0;
  std::vector<Thread*> waiting;
  for (Arrival& each : arrivals) {
    acquired = std::max(acquired, each.acquired);
    raise(*each.thread, each.fenced, kFenced, kVisible);
    if (each.waits) waiting.push_back(each.thread);
  }
  // Clocks of a cooperative launch are those of threads that wait: what others did is not known.
  if (!waiting.empty()) meet_clocks(waiting);
  for (Thread* thread : waiting) {
    thread->acquired = acquired;
    thread->met = all;
    if (thread != device.current) wake(*thread);
  }
}

// Whether the barrier has to wait for more threads.
bool arrive(unsigned id, unsigned threads, bool waits) {
  Thread& self = *device.current;
  NamedBarrier& barrier = named[{self.cta->window, id}];
  barrier.arrivals.push_back(
      {&self, waits, ++self.warp_epoch, self.acquired, self.met, std::move(self.fenced)});
  self.fenced.clear();
  if (barrier.arrivals.size() < threads) return true;
  std::vector<Arrival> arrivals;
  arrivals.swap(barrier.arrivals);
  complete(std::move(arrivals));
  return false;
}
}  // namespace

void note_peer(unsigned window, size_t offset, Site site) {
  Cta& target = device.ctas[window];
  note_remote(target, offset, site, target.touched);
}

void check_store(unsigned window, size_t offset, size_t bytes, Site site) {
  Span written{window, offset, offset + bytes};
  std::pair<Site, const char*> readers[] = {
      {copy_out_of(written), "a store overwrites what a copy still reads"},
      {product_reads(written), "a store overwrites a tile that is still being multiplied"}};
  for (const auto& [reader, what] : readers) {
    if (reader == kNoSite || !is_news("async-race", reader, site)) continue;
    report({"async-race", shared_place(offset), reader, site, current_cta(), current_thread(),
            what});
  }
}

void note_generic_store(size_t offset, size_t bytes) {
  Thread& self = *device.current;
  std::vector<uint8_t>& words = words_of(self.cta->window);
  for (size_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) words[word] = kStored;
  if (self.stored.size() == self.stored.capacity()) {  // a loop stores to few places many times
    std::sort(self.stored.begin(), self.stored.end());
    self.stored.erase(std::unique(self.stored.begin(), self.stored.end()), self.stored.end());
  }
  self.stored.push_back({offset, offset + bytes});
}

void note_generic_load(unsigned window, size_t offset, size_t bytes, Site site) {
  const Thread& self = *device.current;
  std::vector<LastLoad>& words = loads_of(window);
  for (size_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) {
    words[word] = {&self, self.proxy_fences, site};
  }
}

void check_loaded(const Span& span, Site site) {
  std::vector<LastLoad>& words = loads_of(span.window);
  for (size_t word = span.begin / 4; word < span.end / 4; ++word) {
    const LastLoad last = std::exchange(words[word], LastLoad());
    if (!last.thread || last.thread->proxy_fences != last.fences) continue;
    if (!is_news("async-race", last.site, site)) continue;
    report({"async-race", shared_place(word * 4), last.site, site, current_cta(), current_thread(),
            format("a copy overwrites what thread %u read by an ordinary load that no "
                   "fence.proxy.async follows", last.thread->index())});
  }
}

void publish_stores(const std::vector<Thread*>& threads) {
  for (Thread* thread : threads) {
    raise(*thread, thread->fenced, kFenced, kVisible);
    thread->fenced.clear();
  }
}

void check_visible(const Span& span, Reader kind, Site site) {
  const char* reasons[] = {"that nothing was stored to",
                           "whose store no fence.proxy.async follows",
                           "whose store no barrier orders before it"};
  bool copies = kind == Reader::kCopy;
  std::vector<uint8_t>& words = words_of(span.window);
  const size_t end = span.end / 4;
  for (size_t word = span.begin / 4; word < end; ++word) {
    while (word + 8 <= end && are_visible(&words[word], copies)) word += 8;
    if (word == end) return;
    // What wgmma reads may have come by other ways than ordinary stores.
    if (words[word] == kVisible || (words[word] == kUntouched && !copies)) continue;
    if (!is_news("async-race", site, kNoSite)) return;
    report({"async-race", shared_place(word * 4), site, kNoSite, current_cta(), current_thread(),
            format("%s reads bytes %s", copies ? "a copy by TMA" : "wgmma",
                   reasons[words[word]])});
    return;
  }
}

void note_filled(const Span& span) {
  std::vector<uint8_t>& words = words_of(span.window);
  for (size_t word = span.begin / 4; word < span.end / 4; ++word) words[word] = kUntouched;
}

void clear_visibility() {
  visibility.clear();
  loads.clear();
}
void clear_named_barriers() { named.clear(); }

}  // namespace emu

extern "C" {
void crossfuse_emulate_fence_async(int space) {
  if (space != CROSSFUSE_SHARED) emu::fence_clock();
  if (space == CROSSFUSE_GLOBAL) return;
  emu::Thread& self = *emu::device.current;
  ++self.proxy_fences;
  emu::raise(self, self.stored, emu::kStored, emu::kFenced);
  self.fenced.insert(self.fenced.end(), self.stored.begin(), self.stored.end());
  self.stored.clear();
}

void crossfuse_emulate_named_barrier(unsigned id, unsigned threads) {
  using namespace emu;
  if (arrive(id, threads, true)) block(Wait::kNamed, CROSSFUSE_SITE);
}

void crossfuse_emulate_named_arrive(unsigned id, unsigned threads) {
  emu::arrive(id, threads, false);
}

// Lane l names row l % 8 of matrix l / 8; each lane holds two elements of every matrix.
void crossfuse_emulate_store_matrices(unsigned address, const unsigned* registers, unsigned count) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  Thread& self = *device.current;
  const uint64_t* rows = meet(~0u, address, site);
  for (unsigned matrix = 0; matrix < count; ++matrix) {
    unsigned window = 0;
    size_t offset = 0;
    if (!locate(static_cast<unsigned>(rows[matrix * 8 + self.lane / 4]), window, offset)) return;
    store_words(window, offset + self.lane % 4 * 4, &registers[matrix], 4, site);
  }
}

void crossfuse_emulate_store_shared(unsigned address, const float* values, unsigned bytes) {
  using namespace emu;
  unsigned window = 0;
  size_t offset = 0;
  if (locate(address, window, offset)) store_words(window, offset, values, bytes, CROSSFUSE_SITE);
}
}
