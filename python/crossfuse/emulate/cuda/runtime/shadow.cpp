#include "async.h"
#include "copies.h"
#include "races.h"
#include "repeats.h"
#include "schedule.h"
#include "shadow.h"
#include "tiles.h"

#include <algorithm>
#include <cstring>
#include <utility>

extern "C" char __executable_start, end;  // of the linker: the image of this program

namespace emu {

namespace {

unsigned kinship(const Access& a, const Access& b) {
  if (!is_same_cta(a, b)) return 0;
  return a.index() / kWarp == b.index() / kWarp ? 2 : 1;
}

bool is_same_doer(const Access& a, const Access& b) {
  return a.cluster == b.cluster && a.thread == b.thread && a.agent == b.agent;
}

// Keeps two reads that no barrier has yet made redundant, of threads as unrelated as possible:
// whatever orders a later write after one of them then does not order it after the other.
void keep_read(Cell& cell, const Access& now, const Thread& thread, bool shared) {
  Access *a = &cell.reads[0], *b = &cell.reads[1];
  if (is_same_doer(*b, now)) std::swap(a, b);
  if (is_empty(*a, thread, shared) || is_same_doer(*a, now) || ordered(*a, thread, shared, Due::kOver)) {
    *a = now;
    return;
  }
  if (is_empty(*b, thread, shared) || ordered(*b, thread, shared, Due::kOver)) {
    *b = now;
    return;
  }
  if (device.grid->launch.cooperative && !shared) {
    // Any CTA of the grid may read: chance keeps different ones in different cells.
    uint64_t chance = random_source();
    if (chance % 2) *(chance % 4 == 1 ? a : b) = now;
    return;
  }
  unsigned old = kinship(*a, *b);
  if (kinship(*a, now) < old || (kinship(*a, now) == old && now.arrived > b->arrived)) {
    *b = now;
  } else if (kinship(*b, now) < old || (kinship(*b, now) == old && now.arrived > a->arrived)) {
    *a = now;
  }
}

// What TMA loads must have passed from the proxy that wrote it to the one that reads it.
void check_proxy(const Region& region, size_t offset, const Access& write, const Access& now,
                 const Thread& thread) {
  if (write.cluster < device.first_cluster || start_of(write).grid != device.grid) return;
  if (!is_known(write, thread)) return;
  if (copy_sees(write, thread, false) || !is_news("async-race", write.site, now.site)) return;
  const char* where = write.agent == static_cast<unsigned>(Agent::kThread)
                          ? "between that store and this copy"
                          : "between the acquire and this copy";
  report({"async-race", place_of(region, offset), write.site, now.site, current_cta(),
          current_thread(),
          format("a copy by TMA of %s reads what %s wrote, and no fence.proxy.async lies %s",
                 who(now).c_str(), who(write).c_str(), where)});
}

// Who wrote a cell: of several who stored the same bits, one that the thread comes after.
const Access& writer_of(const Region& region, const Cell& cell, size_t offset,
                        const Thread& thread) {
  const std::vector<Access>* repeats = find_repeats(region.base + offset);
  if (!repeats || ordered(cell.write, thread, false)) return cell.write;
  for (const Access& each : *repeats) {
    if (ordered(each, thread, false)) return each;
  }
  return cell.write;
}

// Notes that a CTA barrier is needed: it alone orders these two. Where clocks run, all count as needed.
void note_ordering(const Access& before, const Thread& now) {
  if (device.grid->launch.clocked || before.cluster != now.cta->cluster->id) return;
  if (before.rank() != now.cta->rank || before.thread == now.id) return;
  if (now.cta_epoch == before.cta_epoch + 1) note_use(now.cta_barrier, true);
}

void check_cell(Region& region, Cell& cell, size_t offset, const Access& now, const Thread& thread,
                Mode mode) {
  bool shared = region.argument < 0;
  bool written = !is_empty(cell.write, thread, shared);
  bool known = written || region.initialised;
  if (reads(mode) && !known && is_news("uninitialised-read", now.site, kNoSite)) {
    report({"uninitialised-read", place_of(region, offset), now.site, kNoSite, current_cta(),
            current_thread(), format("%s %s it before anything wrote it", who(now).c_str(),
                                     verb(mode))});
  }
  const Access write = shared ? cell.write : writer_of(region, cell, offset, thread);
  bool both_atomic = now.site & write.site & kAtomic;
  if (written && !both_atomic && !ordered(write, thread, shared)) {
    race(region, offset, write, true, now, mode);
  }
  if (written) note_ordering(write, thread);
  bool by_copy = now.agent == static_cast<unsigned>(Agent::kLoads);
  if (by_copy && device.grid->launch.cooperative) check_proxy(region, offset, write, now, thread);
  if (!writes(mode)) return keep_read(cell, now, thread, shared);
  for (Access& read : cell.reads) {
    if (is_empty(read, thread, shared)) continue;
    note_ordering(read, thread);
    both_atomic = now.site & read.site & kAtomic;
    if (!both_atomic && !ordered(read, thread, shared, Due::kOver)) {
      race(region, offset, read, false, now, mode);
    }
    read.cluster = 0;
  }
  cell.write = now;
  if (!shared && device.grid->launch.helps) forget_repeats(region.base + offset);
}

void refine_to(Region& region, size_t places) {
  size_t grid = (size_t(1) << region.granule) - 1;
  if (places & grid) refine(region, __builtin_ctzl(places));
}

void check_cells(Region& region, size_t offset, size_t bytes, Mode mode, Site site,
                 Doer doer = {}) {
  const Thread& thread = *device.current;
  refine_to(region, offset | bytes);
  const Access now = access_now(mode, site, doer);
  Cell* cell = region.cells + (offset >> region.granule);
  for (size_t at = offset; at < offset + bytes; at += size_t(1) << region.granule) {
    check_cell(region, *cell++, at, now, thread, mode);
  }
}

// Whether others touched these bytes in this launch, and nothing orders them before the thread.
bool is_contested(Region& region, size_t offset, size_t bytes) {
  const Thread& thread = *device.current;
  refine_to(region, offset | bytes);
  auto contests = [&](const Access& e) { return e.cluster != 0 && !ordered(e, thread, false); };
  const Cell* cell = region.cells + (offset >> region.granule);
  for (size_t at = 0; at < bytes; at += size_t(1) << region.granule, ++cell) {
    if (contests(cell->write) || contests(cell->reads[0]) || contests(cell->reads[1])) return true;
    const std::vector<Access>* repeats = find_repeats(region.base + offset + at);
    if (repeats && std::any_of(repeats->begin(), repeats->end(), contests)) return true;
  }
  return false;
}

void outside(const Place& place, size_t bytes, Mode mode, Site site, const std::string& why) {
  if (!is_news("out-of-bounds", site, kNoSite)) return;
  report({"out-of-bounds", place, site, kNoSite, current_cta(), current_thread(),
          format("%s %zu bytes %s", verb(mode), bytes, why.c_str())});
}

void access_argument(unsigned index, const uint8_t* pointer, size_t bytes, Mode mode, Site site,
                     Doer doer) {
  Region& region = buffers[index].region;
  long offset = pointer - region.base;
  if (offset < 0 || static_cast<size_t>(offset) + bytes > region.bytes) {
    return outside({static_cast<int>(index), "", offset}, bytes, mode, site,
                   format("at byte %ld of a buffer of %zu", offset, region.bytes));
  }
  if (!region.writable && writes(mode)) {
    if (is_news("write-to-input", site, kNoSite)) {
      report({"write-to-input", place_of(region, offset), site, kNoSite, current_cta(),
              current_thread(), "the buffer is not an output"});
    }
    return;
  }
  if (!region.cells) return;
  check_dependence(region, place_of(region, offset), writes(mode), site);
  const bool stores = mode == Mode::kWrite && doer.agent == Agent::kThread;
  if (device.grid->launch.helps && stores && is_contested(region, offset, bytes)) {
    unsettled = {&region, static_cast<size_t>(offset), {pointer, pointer + bytes}, site};
    return;
  }
  check_cells(region, offset, bytes, mode, site, doer);
}

void access_shared(size_t at, size_t bytes, Mode mode, Site site) {
  unsigned window = at >> kWindowBits;
  size_t offset = at & ((size_t(1) << kWindowBits) - 1);
  Cta& own = *device.current->cta;
  if (window != own.window) {
    unsigned rank = window - own.cluster->first;
    return outside({-1, "", -1, true}, bytes, mode, site,
                   rank >= device.grid->launch.ctas()
                       ? format("in the window of another cluster")
                       : format("in the window of CTA rank %u through an ordinary pointer", rank));
  }
  if (!find_shared(offset, bytes)) {
    return outside(shared_place(offset), bytes, mode, site, "outside every shared array");
  }
  Site writer = reads(mode) ? copy_into({window, offset, offset + bytes}) : kNoSite;
  if (writer != kNoSite && is_news("async-race", writer, site)) {
    report({"async-race", shared_place(offset), writer, site, current_cta(), current_thread(),
            "reads what is still being stored"});
  }
  if (writes(mode)) check_store(window, offset, bytes, site);
  check_cells(own.shared, offset, bytes, mode, site);
}

}  // namespace

Access access_now(Mode mode, Site site, Doer doer) {
  const Thread& thread = *device.current;
  Access now;
  now.site = is_atomic(mode) ? site | kAtomic : site;
  now.cluster = thread.cta->cluster->id;
  now.cta_epoch = thread.cta_epoch;
  now.warp_epoch = thread.warp_epoch;
  now.arrived = thread.arrived;
  now.thread = thread.id;
  now.agent = static_cast<unsigned>(doer.agent);
  now.time = doer.agent == Agent::kThread ? thread.time : doer.number;
  if (doer.agent == Agent::kThread) device.current->last_access = thread.time;
  return now;
}

void settle() {
  if (!unsettled.region) return;
  const Unsettled store = std::exchange(unsettled, Unsettled());
  Region& region = *store.region;
  const size_t bytes = store.before.size();
  const uint8_t* place = region.base + store.offset;
  if (memcmp(place, store.before.data(), bytes) == 0) {
    return add_repeat(place, bytes, access_now(Mode::kWrite, store.site, {}));
  }
  check_cells(region, store.offset, bytes, Mode::kWrite, store.site);
}

void access(const void* pointer, size_t bytes, Mode mode, Site site, Doer doer) {
  size_t at = static_cast<const uint8_t*>(pointer) - arena.base;
  unsigned slot = at >> kSlotBits;
  if (!device.current) return;
  if (slot == kStackSlot) {
    return touch_registers(at & ((size_t(1) << kSlotBits) - 1), bytes, writes(mode), site);
  }
  settle();
  device.last_site = site;
  if (at < arena.bytes) {
    if (slot == kSharedSlot) return access_shared(at, bytes, mode, site);
    return access_argument(slot - kFirstArgumentSlot, static_cast<const uint8_t*>(pointer), bytes,
                           mode, site, doer);
  }
  const char* byte = static_cast<const char*>(pointer);
  if (mode == Mode::kRead && byte >= &__executable_start && byte < &end) return;  // constants
  outside({}, bytes, mode, site, format("at address %p, which belongs to no buffer", pointer));
}

Cell* cells_at(Region& region, size_t offset, size_t bytes) {
  refine_to(region, offset | bytes);
  return region.cells + (offset >> region.granule);
}

bool remote_access(Cta& target, size_t offset, size_t bytes, Mode mode, Site site) {
  if (offset & (bytes - 1)) {
    if (is_news("misaligned", site, kNoSite)) {
      report({"misaligned", shared_place(offset), site, kNoSite, current_cta(), current_thread(),
              format("a remote access of %zu bytes at byte %zu of the window", bytes, offset)});
    }
    return false;
  }
  if (!find_shared(offset, bytes)) {
    outside(shared_place(offset), bytes, mode, site,
            format("outside every shared array of CTA rank %u", target.rank));
    return false;
  }
  const Site writer = reads(mode) ? copy_into({target.window, offset, offset + bytes}) : kNoSite;
  if (writer != kNoSite && is_news("async-race", writer, site)) {
    report({"async-race", shared_place(offset), writer, site, current_cta(), current_thread(),
            "reads what is still being stored"});
  }
  if (writes(mode)) check_store(target.window, offset, bytes, site);
  check_cells(target.shared, offset, bytes, mode, site);
  return true;
}

}  // namespace emu
