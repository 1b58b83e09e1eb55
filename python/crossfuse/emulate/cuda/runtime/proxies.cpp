// Named barriers, matrices stored by a warp, and what of ordinary stores TMA can see.
#include <algorithm>
#include <cstring>

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
  Span written{window, offset, offset + bytes};
  std::pair<Site, const char*> readers[] = {
      {copy_out_of(written), "a store overwrites what a copy still reads"},
      {product_reads(written), "a store overwrites a tile that is still being multiplied"}};
  for (const auto& [reader, what] : readers) {
    if (reader == kNoSite || !is_news("async-race", reader, site)) continue;
    report({"async-race", shared_place(offset), reader, site, current_cta(), current_thread(),
            what});
  }
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

struct NamedBarrier {
  std::vector<Thread*> threads;
};
std::map<std::pair<unsigned, unsigned>, NamedBarrier> named;

// Each knows now what any of them knew, and what all of them have done.
void join_met(const std::vector<Thread*>& threads) {
  auto all = std::make_shared<Times>(device.launch.threads(), 0);
  const Times* joined = nullptr;
  for (const Thread* thread : threads) {
    const Times* each = thread->met.get();
    if (!each || each == joined) continue;
    joined = each;  // mostly that of all, since they met before
    for (size_t i = 0; i < all->size(); ++i) (*all)[i] = std::max((*all)[i], (*each)[i]);
  }
  for (Thread* thread : threads) (*all)[thread->index()] = ++thread->warp_epoch;
  for (Thread* thread : threads) thread->met = all;
}
}  // namespace

void note_peer(unsigned window, size_t offset, Site site) {
  note_remote(device.ctas[window], offset, site);
}

void note_generic_store(size_t offset, size_t bytes) {
  Thread& self = *device.current;
  std::vector<uint8_t>& words = words_of(self.cta->window);
  for (size_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) words[word] = kStored;
  self.stored.push_back({offset, offset + bytes});
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

void clear_visibility() { visibility.clear(); }
void clear_named_barriers() { named.clear(); }

}  // namespace emu

extern "C" {
void crossfuse_emulate_fence_async(int space) {
  if (space != CROSSFUSE_SHARED) emu::fence_clock();
  if (space == CROSSFUSE_GLOBAL) return;
  emu::Thread& self = *emu::device.current;
  emu::raise(self, self.stored, emu::kStored, emu::kFenced);
  self.fenced.insert(self.fenced.end(), self.stored.begin(), self.stored.end());
  self.stored.clear();
}

void crossfuse_emulate_named_barrier(unsigned id, unsigned threads) {
  using namespace emu;
  Thread& self = *device.current;
  NamedBarrier& barrier = named[{self.cta->window, id}];
  barrier.threads.push_back(&self);
  if (barrier.threads.size() < threads) return block(Wait::kNamed, CROSSFUSE_SITE);
  std::vector<Thread*> met;
  met.swap(barrier.threads);
  uint16_t acquired = 0;
  for (const Thread* thread : met) acquired = std::max(acquired, thread->acquired);
  publish_stores(met);
  meet_clocks(met);
  join_met(met);
  for (Thread* thread : met) {
    thread->acquired = acquired;
    if (thread != &self) wake(*thread);
  }
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
