// Copies between global and shared memory that finish some time after they are issued.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "copies.h"
#include "schedule.h"
#include "shadow.h"
#include "tiles.h"

namespace emu {

namespace {
using Flying = std::vector<std::unique_ptr<Copy>>;  // pointers, as many are erased out of turn
std::vector<Flying> copies;  // by the window that they write or read
size_t flying = 0;            // all of them

// How many copies touch each so many bytes of a window: each access asks, and mostly there is none.
class Touched {
 public:
  void change(const Span& span, int by) {
    if (last(span) >= counts.size()) counts.resize(last(span) + 1);
    for (size_t i = span.begin / kBytes; i <= last(span); ++i) counts[i] += by;
  }
  bool meets(const Span& span) const {
    const size_t end = std::min(last(span) + 1, counts.size());
    for (size_t i = span.begin / kBytes; i < end; ++i) {
      if (counts[i]) return true;
    }
    return false;
  }

 private:
  static constexpr size_t kBytes = 16;
  static size_t last(const Span& span) { return (std::max(span.end, span.begin + 1) - 1) / kBytes; }
  std::vector<int> counts;
};
std::vector<Touched> fill_places, read_places;  // by the window

void count_copy(const Copy& copy, int by) {
  flying += by;
  if (copy.fills_shared()) fill_places[copy.shared.window].change(copy.shared, by);
  if (copy.flight == Flight::kStore) read_places[copy.shared.window].change(copy.shared, by);
}

void enlist(std::unique_ptr<Copy> copy) {
  count_copy(*copy, 1);
  copies[copy->shared.window].push_back(std::move(copy));
}

// The swizzle of TMA and wgmma: bits 4.. of an address are mixed with bits 7..
size_t swizzled(size_t address, unsigned span) {
  size_t mask = span / 16 ? span / 16 - 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

uint8_t* element(const Copy& copy, unsigned row, unsigned column) {
  const CUtensorMap& map = copy.map;
  long x = long(copy.x) + column, y = copy.y + row % map.box[1];
  if (x < 0 || x >= long(map.extents[0])) return nullptr;
  if (map.pixels) {
    uint8_t* first = pixel(copy, row);
    return first ? first + size_t(x) * map.item : nullptr;
  }
  if (y < 0 || y >= long(map.extents[1])) return nullptr;
  uint8_t* matrix = static_cast<uint8_t*>(map.base);
  for (unsigned axis = 2; axis < map.rank; ++axis) {
    long at = copy.matrix[axis - 2];
    if (axis == 2) at += row / map.box[1];
    if (at < 0 || at >= long(map.extents[axis])) return nullptr;
    matrix += size_t(at) * map.strides[axis - 1];
  }
  return matrix + size_t(y) * map.strides[0] + size_t(x) * map.item;
}

// Calls `each(global, at)` for all elements of the box: its place in global memory, null outside
// the tensor, and in the window. Pages that a descriptor wrongly reaches are lent to the owner.
template <class Each>
void for_elements(const Copy& copy, Each each) {
  const CUtensorMap& map = copy.map;
  Thread* const before = device.current;
  device.current = copy.owner;
  for (unsigned row = 0; row < box_rows(map); ++row) {
    for (unsigned column = 0; column < map.box[0]; ++column) {
      size_t at = copy.shared.begin + (size_t(row) * map.box[0] + column) * map.item;
      each(element(copy, row, column), swizzled(at, map.swizzle));
    }
  }
  device.current = before;
}

// The record of what a copy fills.
Access access_of(const Copy& copy) {
  Access fill;
  fill.site = copy.site;
  fill.cluster = copy.owner->cta->cluster->id;
  fill.thread = copy.owner->id;
  fill.agent = static_cast<unsigned>(copy.fills);
  count_by(copy.shared.window, copy.barrier, fill);
  return fill;
}

void fill_shared(const Copy& copy) {
  note_filled(copy.shared, access_of(copy));
  uint8_t* window = window_of(copy.shared.window);
  if (copy.flight == Flight::kPush) {
    memcpy(window + copy.shared.begin, copy.values.data(), copy.values.size());
    return;
  }
  for_elements(copy, [&](const uint8_t* global, size_t at) {
    if (global) memcpy(window + at, global, copy.map.item);
    if (!global) memset(window + at, 0, copy.map.item);
  });
}

void read_shared(Copy& copy) {
  const uint8_t* window = window_of(copy.shared.window);
  copy.values.reserve(copy.shared.end - copy.shared.begin);
  for_elements(copy, [&](const uint8_t*, size_t at) {
    copy.values.insert(copy.values.end(), window + at, window + at + copy.map.item);
  });
}

void land(const Copy& copy) {
  const uint8_t* value = copy.values.data();
  for_elements(copy, [&](uint8_t* global, size_t) {
    if (global) memcpy(global, value, copy.map.item);
    value += copy.map.item;
  });
  // Clocks have noted the store where it was issued, and know until when it may land.
  if (copy.owner->cta->cluster->grid->launch.cooperative) return;
  device.current = copy.owner;
  note_global(copy);
  device.current = nullptr;
}

// One step further: what leaves shared memory is read first, and lands some time after. False if it
// goes on.
bool is_landed(Copy& copy) {
  bool reads = copy.flight == Flight::kStore;
  if (reads) {
    read_shared(copy);
    copy.flight = Flight::kLanding;
    copy.delay = random_delay();
  } else if (copy.flight == Flight::kLanding) {
    land(copy);
  } else {
    fill_shared(copy);
    complete_bytes(copy.shared.window, copy.barrier, long(copy.shared.end - copy.shared.begin),
                   copy.site, *copy.owner, copy.fills, copy.number, copy.past);
  }
  if (copy.owner->wait == Wait::kCopies) wake(*copy.owner);
  return !reads;
}

void step(Flying& among, size_t index) {
  // Taken out first: a finding may end the process, and what it wakes may look at what is left.
  std::unique_ptr<Copy> copy = std::move(among[index]);
  const Turn turn(*copy->owner->cta->cluster);
  among.erase(among.begin() + static_cast<long>(index));
  count_copy(*copy, -1);
  if (!is_landed(*copy)) enlist(std::move(copy));
}
}  // namespace

void launch(Copy copy) {
  copy.owner = device.current;
  copy.past = past_of(device.current->clock);
  copy.delay = random_delay();
  enlist(std::make_unique<Copy>(std::move(copy)));
}

void note_global(const Copy& copy) {
  bool loads = copy.flight == Flight::kLoad;
  Mode mode = loads ? Mode::kRead : Mode::kWrite;
  Doer doer{loads ? Agent::kLoads : Agent::kStores, copy.number};
  long first = std::max(0L, -long(copy.x));
  long last = std::min(long(copy.map.box[0]), long(copy.map.extents[0]) - copy.x);
  for (unsigned row = 0; row < box_rows(copy.map) && first < last; ++row) {
    const uint8_t* begin = element(copy, row, static_cast<unsigned>(first));
    size_t bytes = size_t(last - first) * copy.map.item;
    if (begin) access(begin, bytes, mode, copy.site, doer);
  }
}

bool in_flight(const Thread& thread, unsigned pending, bool only_reads) {
  for (const auto& copy : copies[thread.cta->window]) {
    bool counts =
        copy->flight == Flight::kStore || (copy->flight == Flight::kLanding && !only_reads);
    if (counts && copy->owner == &thread && copy->number + pending <= thread.bulk_groups) {
      return true;
    }
  }
  return false;
}

bool advance_copies(bool forced) {
  if (flying == 0) return false;
  for (Flying& each : copies) {
    for (size_t i = 0; i < each.size();) {
      if (!forced && each[i]->delay) {
        --each[i++]->delay;
      } else {
        step(each, i);
        if (forced) return true;
      }
    }
  }
  return true;
}

Site copy_into(const Span& span) {
  if (!fill_places[span.window].meets(span)) return kNoSite;
  for (const auto& copy : copies[span.window]) {
    if (copy->fills_shared() && copy->shared.meets(span)) return copy->site;
  }
  return kNoSite;
}

Site copy_out_of(const Span& span) {
  if (!read_places[span.window].meets(span)) return kNoSite;
  for (const auto& copy : copies[span.window]) {
    if (copy->flight == Flight::kStore && copy->shared.meets(span)) return copy->site;
  }
  return kNoSite;
}

void check_copies_at_end(const Cluster& cluster) {
  for (const Cta& cta : ctas_of(cluster)) {
    for (const auto& each : copies[cta.window]) {
      const Copy& copy = *each;
      count_copy(copy, -1);
      // What has been read needs the CTA no more.
      if (copy.flight == Flight::kLanding) land(copy);
      if (copy.flight == Flight::kLanding || !is_news("early-exit", copy.site, kNoSite)) continue;
      report({"early-exit", shared_place(copy.shared.begin), copy.site, kNoSite,
              static_cast<int>(cta.linear), -1,
              "the CTA has exited while this copy was in flight"});
    }
    copies[cta.window].clear();
  }
}

void clear_copies() {
  for (auto each : {&fill_places, &read_places}) each->assign(device.ctas.size(), {});
  copies.clear();
  copies.resize(device.ctas.size());
  flying = 0;
}

}  // namespace emu

