#include "additions.h"
#include "copies.h"
#include "schedule.h"
#include "shadow.h"

#include <utility>

extern "C" char __executable_start, end;  // of the linker: the image of this program

namespace emu {

namespace {

// Whether everything the current thread does now comes after `e`. Barriers decide, not luck:
// a CTA barrier orders threads of one CTA, a cluster barrier those who waited after the arrival,
// a warp-wide operation the lanes that met, a named barrier the threads that did. In global memory of a cooperative launch, clocks do.
inline bool ordered(const Access& e, const Thread& now, bool shared) {
  if (e.cluster < device.first_cluster) return true;
  // What TMA has brought to shared memory: while it is on its way, reads are refused.
  if (shared && e.agent == static_cast<unsigned>(Agent::kLoads)) return true;
  if (device.launch.cooperative && !shared) return is_known(e, now);
  if (e.cluster != now.cta->cluster->id) return false;
  if (e.thread == now.id || now.acquired > e.arrived) return true;
  if (e.rank() != now.cta->rank) return false;
  if (now.cta_epoch > e.cta_epoch) return true;
  if (now.met && (*now.met)[e.index()] > e.warp_epoch) return true;
  if (e.index() / kWarp != now.index() / kWarp) return false;
  return now.seen[e.index() % kWarp] > e.warp_epoch;
}

inline bool is_empty(const Access& e, const Thread& now, bool shared) {
  // Shared memory lives as long as its cluster: older records are of another life.
  return shared ? e.cluster != now.cta->cluster->id : e.cluster == 0;
}

bool is_atomic(Mode mode) { return mode >= Mode::kAtomic; }
bool reads(Mode mode) { return mode != Mode::kWrite && mode != Mode::kAtomicWrite; }
bool writes(Mode mode) { return mode != Mode::kRead && mode != Mode::kAtomicRead; }

Place place_of(const Region& region, size_t offset) {
  if (region.argument < 0) return shared_place(offset);
  return {region.argument, "", static_cast<long>(offset)};
}

const char* verb(Mode mode) {
  return mode == Mode::kAtomic ? "updates" : reads(mode) ? "reads" : "writes";
}

bool is_same_cta(const Access& a, const Access& b) {
  return a.cluster == b.cluster && a.rank() == b.rank();
}

// What would have ordered two accesses.
const char* missing_between(const Access& before, const Access& now, bool shared) {
  if (device.launch.cooperative && !shared) {
    if (before.agent == static_cast<unsigned>(Agent::kStores)) {
      return "the copy is not waited for, or no release and acquire of a flag follow";
    }
    if (before.agent == static_cast<unsigned>(Agent::kLoads)) {
      return "nothing that follows the end of the copy lies between";
    }
    if (!is_same_cta(before, now)) return "no release and acquire of a flag lie between";
  }
  if (before.cluster != now.cluster) return "clusters of one launch are never ordered";
  if (before.rank() != now.rank()) return "no cluster barrier lies between";
  bool same_warp = before.index() / kWarp == now.index() / kWarp;
  return same_warp ? "no CTA barrier or __syncwarp lies between" : "no CTA barrier lies between";
}

void race(const Region& region, size_t offset, const Access& before, bool before_wrote,
          const Access& now, Mode mode) {
  if (!is_news("race", before.site, now.site)) return;
  const char* done = !before_wrote ? "reads" : before.site & kAtomic ? "updates" : "writes";
  report({"race", place_of(region, offset), before.site, now.site, current_cta(), current_thread(),
          format("%s %s and %s %s it, and %s", who(before).c_str(), done, who(now).c_str(),
                 verb(mode), missing_between(before, now, region.argument < 0))});
}

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
  if (is_empty(*a, thread, shared) || is_same_doer(*a, now) || ordered(*a, thread, shared)) {
    *a = now;
    return;
  }
  if (is_empty(*b, thread, shared) || ordered(*b, thread, shared)) {
    *b = now;
    return;
  }
  if (device.launch.cooperative && !shared) {
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
  if (write.cluster < device.first_cluster || !is_known(write, thread)) return;
  if (copy_sees(write, thread) || !is_news("async-race", write.site, now.site)) return;
  const char* where = write.agent == static_cast<unsigned>(Agent::kThread)
                          ? "between that store and this copy"
                          : "between the acquire and this copy";
  report({"async-race", place_of(region, offset), write.site, now.site, current_cta(),
          current_thread(),
          format("a copy by TMA of %s reads what %s wrote, and no fence.proxy.async lies %s",
                 who(now).c_str(), who(write).c_str(), where)});
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
  bool both_atomic = now.site & cell.write.site & kAtomic;
  if (written && !both_atomic && !ordered(cell.write, thread, shared)) {
    race(region, offset, cell.write, true, now, mode);
  }
  bool by_copy = now.agent == static_cast<unsigned>(Agent::kLoads);
  if (by_copy && device.launch.cooperative) check_proxy(region, offset, cell.write, now, thread);
  if (!writes(mode)) return keep_read(cell, now, thread, shared);
  for (Access& read : cell.reads) {
    if (is_empty(read, thread, shared)) continue;
    both_atomic = now.site & read.site & kAtomic;
    if (!both_atomic && !ordered(read, thread, shared)) {
      race(region, offset, read, false, now, mode);
    }
    read.cluster = 0;
  }
  cell.write = now;
}

// A copy adds to the words of a cell: in any order with others, but after whatever wrote them first.
void check_addition(const Region& region, const Cell& cell, size_t offset, const Access& now,
                    const Thread& thread) {
  for (size_t at = offset; at < offset + (size_t(1) << region.granule); at += kWord) {
    Sum& sum = sum_at(region.base + at);
    if (sum.added.empty()) {
      sum.before = cell.write;
    } else if (sum.before.cluster && !ordered(sum.before, thread, false)) {
      race(region, at, sum.before, true, now, Mode::kAtomic);
    }
    if (sum.before.cluster) check_proxy(region, at, sum.before, now, thread);
    sum.added.push_back(now);
  }
}

// Whatever else touches the words of a cell follows all additions.
void check_sums(const Region& region, size_t offset, const Access& now, const Thread& thread,
                Mode mode) {
  for (size_t at = offset; at < offset + (size_t(1) << region.granule); at += kWord) {
    const Sum* sum = find_sum(region.base + at);
    if (!sum) continue;
    for (const Access& each : sum->added) {
      if (!ordered(each, thread, false)) race(region, at, each, true, now, mode);
    }
    if (writes(mode)) forget_sum(region.base + at);
  }
}

void check_cells(Region& region, size_t offset, size_t bytes, Mode mode, Site site,
                 Doer doer = {}) {
  const Thread& thread = *device.current;
  size_t grid = (size_t(1) << region.granule) - 1;
  if ((offset | bytes) & grid) {
    refine(region, __builtin_ctzl(offset | bytes));
  }
  Access now;
  now.site = is_atomic(mode) ? site | kAtomic : site;
  now.cluster = thread.cta->cluster->id;
  now.cta_epoch = thread.cta_epoch;
  now.warp_epoch = thread.warp_epoch;
  now.arrived = thread.arrived;
  now.thread = thread.id;
  now.agent = static_cast<unsigned>(doer.agent);
  now.time = doer.agent == Agent::kThread ? thread.time : doer.number;
  Cell* cell = region.cells + (offset >> region.granule);
  bool adds = mode == Mode::kAtomic && doer.agent == Agent::kStores;
  bool sums = device.launch.cooperative && region.argument >= 0;
  for (size_t at = offset; at < offset + bytes; at += size_t(1) << region.granule) {
    if (sums && adds) check_addition(region, *cell, at, now, thread);
    if (sums && !adds) check_sums(region, at, now, thread, mode);
    check_cell(region, *cell++, at, now, thread, mode);
  }
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
  check_cells(region, offset, bytes, mode, site, doer);
}

void access_shared(size_t at, size_t bytes, Mode mode, Site site) {
  unsigned window = at >> kWindowBits;
  size_t offset = at & ((size_t(1) << kWindowBits) - 1);
  Cta& own = *device.current->cta;
  if (window != own.window) {
    unsigned rank = window - own.cluster->first;
    return outside({-1, "", -1, true}, bytes, mode, site,
                   rank >= device.launch.ctas()
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
  check_cells(own.shared, offset, bytes, mode, site);
}

}  // namespace

void access(const void* pointer, size_t bytes, Mode mode, Site site, Doer doer) {
  size_t at = static_cast<const uint8_t*>(pointer) - arena.base;
  unsigned slot = at >> kSlotBits;
  if (slot == kStackSlot || !device.current) return;
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
  check_cells(target.shared, offset, bytes, mode, site);
  return true;
}

void note_loaded(const Span& span) {
  Cta& cta = device.ctas[span.window];
  Region& region = cta.shared;
  size_t grid = (size_t(1) << region.granule) - 1;
  if ((span.begin | span.end) & grid) refine(region, __builtin_ctzl(span.begin | span.end));
  Access loaded;
  loaded.cluster = cta.cluster->id;
  loaded.agent = static_cast<unsigned>(Agent::kLoads);
  for (size_t at = span.begin; at < span.end; at += size_t(1) << region.granule) {
    region.cells[at >> region.granule].write = loaded;
  }
}

void check_outputs() {
  for (size_t index = 0; index < buffers.size(); ++index) {
    const Region& region = buffers[index].region;
    if (buffers[index].role != Role::kOutput) continue;
    size_t cell_bytes = size_t(1) << region.granule, missing = 0, first = 0;
    for (size_t at = 0; at < region.bytes; at += cell_bytes) {
      if (region.cells[at >> region.granule].write.cluster) continue;
      if (!missing) first = at;
      missing += at + cell_bytes > region.bytes ? region.bytes - at : cell_bytes;
    }
    if (missing) {
      unsigned item = buffers[index].item;
      report({"unwritten-output", {static_cast<int>(index), "", static_cast<long>(first)}, kNoSite,
              kNoSite, -1, -1, format("%zu of %zu elements were never written",
                                      (missing + item - 1) / item, region.bytes / item)});
    }
  }
}

}  // namespace emu
