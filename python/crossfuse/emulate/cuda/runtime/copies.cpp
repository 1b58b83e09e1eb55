// TMA: copies between global and shared memory that finish some time after they are issued.
#include <algorithm>
#include <cstring>

#include "async.h"
#include "schedule.h"
#include "shadow.h"

namespace emu {

namespace {
struct Copy {
  CUtensorMap map{};
  int x = 0, y = 0;
  Span shared;
  size_t barrier = 0;  // of a load
  bool is_load = true;
  Site site = kNoSite;
  Thread* owner = nullptr;  // of a store
  unsigned group = 0;       // of the owner's commits
  std::vector<uint8_t> values;  // of an asynchronous store, instead of a map
  unsigned delay = 0;
};
std::vector<std::vector<Copy>> copies;  // by the window that they write or read
size_t flying = 0;                      // all of them

// The swizzle of TMA and wgmma: bits 4.. of an address are mixed with bits 7..
size_t swizzled(size_t address, unsigned span) {
  size_t mask = span / 16 ? span / 16 - 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

// Rounds of the scheduler that a copy takes: mostly few, now and then very many.
unsigned delay() {
  uint64_t number = random_source();
  return static_cast<unsigned>(number % 4 ? number / 4 % 6 : number / 4 % 64);
}

uint8_t* element(const Copy& copy, unsigned row, unsigned column) {
  long x = long(copy.x) + column, y = long(copy.y) + row;
  const CUtensorMap& map = copy.map;
  if (x < 0 || y < 0 || x >= long(map.extents[0]) || y >= long(map.extents[1])) return nullptr;
  return static_cast<uint8_t*>(map.base) + size_t(y) * map.pitch + size_t(x) * map.item;
}

void move(const Copy& copy) {
  if (!copy.values.empty()) {
    memcpy(window_of(copy.shared.window) + copy.shared.begin, copy.values.data(), copy.values.size());
    return;
  }
  const CUtensorMap& map = copy.map;
  uint8_t* window = window_of(copy.shared.window);
  for (unsigned row = 0; row < map.box[1]; ++row) {
    for (unsigned column = 0; column < map.box[0]; ++column) {
      size_t at = copy.shared.begin + (size_t(row) * map.box[0] + column) * map.item;
      uint8_t* shared = window + swizzled(at, map.swizzle);
      uint8_t* global = element(copy, row, column);
      if (copy.is_load && global) memcpy(shared, global, map.item);
      if (copy.is_load && !global) memset(shared, 0, map.item);
      if (!copy.is_load && global) memcpy(global, shared, map.item);
    }
  }
}

// The thread that issued a store answers for it.
void note_stored(const Copy& copy) {
  device.current = copy.owner;
  long width = std::min(long(copy.map.box[0]), long(copy.map.extents[0]) - copy.x);
  for (unsigned row = 0; row < copy.map.box[1] && width > 0; ++row) {
    uint8_t* first = element(copy, row, 0);
    if (first) access(first, size_t(width) * copy.map.item, Mode::kWrite, copy.site);
  }
  device.current = nullptr;
}

void launch(const Copy& copy) {
  copies[copy.shared.window].push_back(copy);
  ++flying;
}

void finish(std::vector<Copy>& among, size_t index) {
  Copy copy = among[index];
  among.erase(among.begin() + static_cast<long>(index));
  --flying;
  move(copy);
  if (!copy.is_load) note_stored(copy);
  if (copy.is_load) {
    complete_bytes(copy.shared.window, copy.barrier, long(copy.shared.end - copy.shared.begin),
                   copy.site);
  } else if (copy.owner->wait == Wait::kCopies) {
    wake(*copy.owner);
  }
}

void check_target(const Copy& copy, const char* verb) {
  if (!find_shared(copy.shared.begin, copy.shared.end - copy.shared.begin) &&
      is_news("out-of-bounds", copy.site, kNoSite)) {
    report({"out-of-bounds", shared_place(copy.shared.begin), copy.site, kNoSite, current_cta(),
            current_thread(),
            format("a copy %s %zu bytes", verb, copy.shared.end - copy.shared.begin)});
    stop();
  }
  if (copy.shared.begin % 128 && is_news("misaligned", copy.site, kNoSite)) {
    report({"misaligned", shared_place(copy.shared.begin), copy.site, kNoSite, current_cta(),
            current_thread(), "a copy by TMA needs an alignment of 128 bytes in shared memory"});
  }
}

void conflict(const Copy& copy, Site other, const char* what) {
  if (other == kNoSite || !is_news("async-race", other, copy.site)) return;
  report({"async-race", shared_place(copy.shared.begin), other, copy.site, current_cta(),
          current_thread(), what});
}

// Whether a copy of all but the `pending` latest groups of a thread is in flight.
bool in_flight(const Thread& thread, unsigned pending) {
  for (const Copy& copy : copies[thread.cta->window]) {
    if (copy.owner == &thread && copy.group + pending <= thread.bulk_groups) return true;
  }
  return false;
}
}  // namespace

bool advance_copies(bool forced) {
  if (flying == 0) return false;
  for (std::vector<Copy>& each : copies) {
    for (size_t i = 0; i < each.size();) {
      if (!forced && each[i].delay) {
        --each[i++].delay;
      } else {
        finish(each, i);
        if (forced) return true;
      }
    }
  }
  return true;
}

Site copy_into(const Span& span) {
  for (const Copy& copy : copies[span.window]) {
    if (copy.is_load && copy.shared.meets(span)) return copy.site;
  }
  return kNoSite;
}

Site copy_out_of(const Span& span) {
  for (const Copy& copy : copies[span.window]) {
    if (!copy.is_load && copy.shared.meets(span)) return copy.site;
  }
  return kNoSite;
}

void check_copies_at_end(const Cluster& cluster) {
  for (const Cta& cta : ctas_of(cluster)) {
    for (const Copy& copy : copies[cta.window]) {
      if (!is_news("early-exit", copy.site, kNoSite)) continue;
      report({"early-exit", shared_place(copy.shared.begin), copy.site, kNoSite,
              static_cast<int>(cta.linear), -1,
              "the CTA has exited while this copy was in flight"});
    }
    flying -= copies[cta.window].size();
    copies[cta.window].clear();
  }
}

void clear_copies() {
  copies.assign(device.ctas.size(), {});
  flying = 0;
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_tma_load(unsigned destination, const void* map, int x, int y,
                                unsigned barrier, int ranks) {
  using namespace emu;
  Copy copy;
  copy.site = CROSSFUSE_SITE;
  copy.map = *static_cast<const CUtensorMap*>(map);
  copy.x = x;
  copy.y = y;
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(destination, window, offset) || !locate(barrier, window, copy.barrier)) return;
  size_t bytes = size_t(copy.map.box[0]) * copy.map.box[1] * copy.map.item;
  unsigned mask = ranks < 0 ? 1u << device.ctas[window].rank : static_cast<unsigned>(ranks);
  for (const Cta& target : ctas_of(*device.current->cta->cluster)) {
    if (!(mask >> target.rank & 1)) continue;
    copy.shared = {target.window, offset, offset + bytes};
    copy.delay = delay();
    check_target(copy, "writes");
    note_peer(target.window, offset, copy.site);
    conflict(copy, copy_into(copy.shared), "two copies write these bytes at once");
    conflict(copy, copy_out_of(copy.shared), "a copy writes what another still reads");
    conflict(copy, product_reads(copy.shared), "a copy writes a tile that is still being multiplied");
    launch(copy);
  }
}

void crossfuse_emulate_tma_store(const void* map, int x, int y, unsigned source) {
  using namespace emu;
  Thread& self = *device.current;
  Copy copy;
  copy.site = CROSSFUSE_SITE;
  copy.map = *static_cast<const CUtensorMap*>(map);
  copy.x = x;
  copy.y = y;
  copy.is_load = false;
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(source, window, offset)) return;
  size_t bytes = size_t(copy.map.box[0]) * copy.map.box[1] * copy.map.item;
  copy.shared = {window, offset, offset + bytes};
  copy.owner = &self;
  copy.group = self.bulk_groups + 1;
  copy.delay = delay();
  check_target(copy, "reads");
  check_visible(copy.shared, copy.site, "a copy by TMA");
  launch(copy);
}

void crossfuse_emulate_store_async(unsigned address, const void* values, unsigned bytes,
                                   unsigned barrier) {
  using namespace emu;
  Copy copy;
  copy.site = CROSSFUSE_SITE;
  unsigned window = 0, other = 0;
  size_t offset = 0;
  if (!locate(address, window, offset) || !locate(barrier, other, copy.barrier)) return;
  if (other != window && is_news("mbarrier", copy.site, kNoSite)) {
    report({"mbarrier", shared_place(offset), copy.site, kNoSite, current_cta(), current_thread(),
            "an asynchronous store completes a barrier of another CTA than it stores to"});
  }
  const uint8_t* bytes_of_values = static_cast<const uint8_t*>(values);
  copy.values.assign(bytes_of_values, bytes_of_values + bytes);
  copy.shared = {window, offset, offset + bytes};
  copy.delay = delay();
  note_peer(window, offset, copy.site);
  if (!find_shared(offset, bytes) && is_news("out-of-bounds", copy.site, kNoSite)) {
    report({"out-of-bounds", shared_place(offset), copy.site, kNoSite, current_cta(),
            current_thread(), format("stores %u bytes", bytes)});
    return;
  }
  conflict(copy, copy_into(copy.shared), "two stores write these bytes at once");
  launch(copy);
}

void crossfuse_emulate_load_shared(unsigned address, void* values, unsigned bytes) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(address, window, offset)) return;
  Site writer = copy_into({window, offset, offset + bytes});
  if (writer != kNoSite && is_news("async-race", writer, site)) {
    report({"async-race", shared_place(offset), writer, site, current_cta(), current_thread(),
            "reads what is still being stored"});
  }
  memcpy(values, window_of(window) + offset, bytes);
}

void crossfuse_emulate_bulk_commit() { ++emu::device.current->bulk_groups; }

void crossfuse_emulate_bulk_wait(unsigned pending) {
  while (emu::in_flight(*emu::device.current, pending)) {
    emu::block(emu::Wait::kCopies, CROSSFUSE_SITE);
  }
}
}
