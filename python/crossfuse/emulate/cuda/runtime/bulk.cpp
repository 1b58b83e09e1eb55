// The instructions that issue copies by TMA and wait for them, and what passes from CTA to CTA.
#include <algorithm>
#include <cstring>

#include "copies.h"
#include "schedule.h"
#include "shadow.h"
#include "tiles.h"

namespace emu {

namespace {
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

size_t box_bytes(const CUtensorMap& map) { return size_t(map.box[0]) * box_rows(map) * map.item; }

void misuse(Site site, const char* what) {
  if (is_news("tensor-map", site, kNoSite)) {
    report({"tensor-map", {}, site, kNoSite, current_cta(), current_thread(), what});
  }
  stop();
}

Copy copy_of(const void* map, int x, long y, Flight flight, Site site) {
  Copy copy;
  copy.site = site;
  copy.map = *static_cast<const CUtensorMap*>(map);
  copy.x = x;
  copy.y = y;
  copy.flight = flight;
  return copy;
}

// Where a thread sends something to: shared memory and a barrier of one CTA. False: nothing is sent.
bool is_aimed(Copy& copy, unsigned address, unsigned bytes, unsigned barrier) {
  unsigned window = 0, other = 0;
  size_t offset = 0;
  if (!locate(address, window, offset) || !locate(barrier, other, copy.barrier)) return false;
  if (other != window && is_news("mbarrier", copy.site, kNoSite)) {
    report({"mbarrier", shared_place(offset), copy.site, kNoSite, current_cta(), current_thread(),
            "an asynchronous store completes a barrier of another CTA than it stores to"});
  }
  copy.shared = {window, offset, offset + bytes};
  check_barrier(window, copy.barrier, false, copy.site);
  note_push(window, copy.barrier, offset, copy.site);
  if (!find_shared(offset, bytes) && is_news("out-of-bounds", copy.site, kNoSite)) {
    report({"out-of-bounds", shared_place(offset), copy.site, kNoSite, current_cta(),
            current_thread(), format("stores %u bytes", bytes)});
    return false;
  }
  conflict(copy, copy_into(copy.shared), "two stores write these bytes at once");
  conflict(copy, copy_out_of(copy.shared), "a store writes what a copy still reads");
  conflict(copy, product_reads(copy.shared), "a store writes a tile that is still being multiplied");
  check_overwritten(copy.shared, false, copy.site);
  return true;
}

Copy tile_of(const void* map, const int* place, unsigned rank, Flight flight, Site site) {
  Copy copy = copy_of(map, place[0], place[1], flight, site);
  if (copy.map.pixels) misuse(site, "a copy of a tile takes a map of pixels");
  if (copy.map.rank != rank) misuse(site, "a copy has not as many coordinates as its map");
  for (unsigned axis = 2; axis < rank; ++axis) copy.matrix[axis - 2] = place[axis];
  return copy;
}

// Issues a load for all `ranks` of the cluster, or for this CTA alone.
void load(Copy copy, unsigned destination, unsigned barrier, int ranks) {
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(destination, window, offset) || !locate(barrier, window, copy.barrier)) return;
  size_t bytes = box_bytes(copy.map);
  copy.number = ++device.current->loads;
  note_global(copy);
  unsigned mask = ranks < 0 ? 1u << device.ctas[window].rank : static_cast<unsigned>(ranks);
  for (const Cta& target : ctas_of(*device.current->cta->cluster)) {
    if (!(mask >> target.rank & 1)) continue;
    copy.shared = {target.window, offset, offset + bytes};
    check_target(copy, "writes");
    note_peer(target.window, offset, copy.site);
    conflict(copy, copy_into(copy.shared), "two copies write these bytes at once");
    conflict(copy, copy_out_of(copy.shared), "a copy writes what another still reads");
    conflict(copy, product_reads(copy.shared), "a copy writes a tile that is still being multiplied");
    check_overwritten(copy.shared, true, copy.site);
    check_barrier(target.window, copy.barrier, true, copy.site);
    launch(copy);
  }
}

// Issues a copy from shared to global memory, or an addition.
void store(Copy copy, unsigned source) {
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(source, window, offset)) return;
  copy.shared = {window, offset, offset + box_bytes(copy.map)};
  copy.number = device.current->bulk_groups + 1;
  check_target(copy, "reads");
  check_visible(copy.shared, Reader::kCopy, copy.site);
  note_copy_read(copy.shared, copy.number, copy.site);
  device.current->last_store = copy.number;
  device.current->store_site = copy.site;
  ++device.current->stores;
  if (device.grid->launch.cooperative) note_global(copy);
  launch(copy);
}
}  // namespace

void check_stores_at_end() {
  const Thread& self = *device.current;
  if (self.last_store <= self.read_stores) return;
  if (!is_news("early-exit", self.store_site, kNoSite)) return;
  report({"early-exit", {}, self.store_site, kNoSite, current_cta(), current_thread(),
          "the thread has exited before it knew that its copy has been read: no "
          "cp.async.bulk.commit_group and wait_group follow"});
}

}  // namespace emu

extern "C" {
void crossfuse_emulate_tma_load(unsigned destination, const void* map, const int* place,
                                unsigned rank, unsigned barrier, int ranks) {
  using namespace emu;
  load(tile_of(map, place, rank, Flight::kLoad, CROSSFUSE_SITE), destination, barrier, ranks);
}

void crossfuse_emulate_tma_load_pixels(unsigned destination, const void* map, int channel, int x,
                                       int y, int image, unsigned barrier, unsigned across,
                                       unsigned down, int ranks) {
  using namespace emu;
  Copy copy = copy_of(map, channel, 0, Flight::kLoad, CROSSFUSE_SITE);
  if (!copy.map.pixels) misuse(copy.site, "a copy of pixels takes a map of a matrix");
  copy.y = pixel_number(copy.map, x, y, image);
  if (copy.y < 0) misuse(copy.site, "a copy of pixels begins outside the box of its map");
  // PTX ISA, im2col mode: offsets of a tensor of four dimensions have 8 bits.
  if (across > 255 || down > 255) misuse(copy.site, "a copy has an offset of more than 255 pixels");
  copy.across = static_cast<int>(across);
  copy.down = static_cast<int>(down);
  load(copy, destination, barrier, ranks);
}

void crossfuse_emulate_tma_store(const void* map, const int* place, unsigned rank,
                                 unsigned source) {
  using namespace emu;
  store(tile_of(map, place, rank, Flight::kStore, CROSSFUSE_SITE), source);
}

void crossfuse_emulate_store_async(unsigned address, const void* values, unsigned bytes,
                                   unsigned barrier) {
  using namespace emu;
  Copy copy;
  copy.site = CROSSFUSE_SITE;
  copy.flight = Flight::kPush;
  copy.fills = Agent::kPushes;
  const uint8_t* bytes_of_values = static_cast<const uint8_t*>(values);
  copy.values.assign(bytes_of_values, bytes_of_values + bytes);
  if (is_aimed(copy, address, bytes, barrier)) launch(copy);
}

void crossfuse_emulate_bulk_commit() {
  emu::note_use(CROSSFUSE_SITE, true);
  emu::Thread& self = *emu::device.current;
  ++self.bulk_groups;
  self.store_groups.push_back(self.stores);
}

void crossfuse_emulate_bulk_wait(unsigned pending, int only_reads) {
  using namespace emu;
  Thread& self = *device.current;
  const unsigned groups = self.bulk_groups - std::min(self.bulk_groups, pending);
  unsigned& known = only_reads ? self.read_stores : self.landed_stores;
  note_use(CROSSFUSE_SITE, known < std::min(groups, self.last_store));
  known = std::max(known, groups);
  while (in_flight(self, pending, only_reads != 0)) block(Wait::kCopies, CROSSFUSE_SITE);
  if (groups == 0) return;
  self.read_stores = std::max(self.read_stores, groups);
  complete_to(self.clock, self, Agent::kStoreReads, groups);
  if (!only_reads) complete_to(self.clock, self, Agent::kStores, groups);
}
}
