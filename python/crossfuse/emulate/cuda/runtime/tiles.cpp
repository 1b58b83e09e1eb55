// Tiles of shared memory, which copies and products read and copies fill, beside the threads. Whether
// these come after what others did there follows from what their thread knows (clocks.h), and whether
// they see what was stored from proxy fences on the way (PTX ISA, memory consistency model, proxies).
#include "tiles.h"

#include <map>

#include "async.h"
#include "races.h"

namespace emu {

namespace {
constexpr size_t kUnit = 16;  // bytes of what is noted as read by one product or copy

// The latest reads of a unit: by products of each warpgroup, and by a copy to global memory.
struct TileRead {
  uint32_t number = 0;
  Site site = kNoSite;
  const Thread* owner = nullptr;  // of the copy
};
using Units = std::vector<TileRead>;
constexpr unsigned kByCopies = kMostWarpgroups;
std::map<std::pair<unsigned, unsigned>, Units> tile_reads;  // by window and reader

Units& units_of(unsigned window, unsigned reader) {
  Units& units = tile_reads[{window, reader}];
  if (units.empty()) units.resize(device.grid->shared_end / kUnit + 1);
  return units;
}

bool is_read_over(const TileRead& read, unsigned window, unsigned reader) {
  if (reader != kByCopies) return are_products_over(window, reader, read.number);
  return are_reads_over(*read.owner, read.number);
}

// Reads that nothing orders before what writes these bytes now.
void check_tile_reads(const Span& span, Site site, const char* who_writes) {
  auto each = tile_reads.lower_bound({span.window, 0});
  for (; each != tile_reads.end() && each->first.first == span.window; ++each) {
    const unsigned reader = each->first.second;
    TileRead last;
    for (size_t unit = span.begin / kUnit; unit <= (span.end - 1) / kUnit; ++unit) {
      const TileRead& read = each->second[unit];
      if (!read.number || (read.number == last.number && read.owner == last.owner)) continue;
      last = read;
      if (is_read_over(read, span.window, reader)) continue;
      if (!is_news("async-race", read.site, site)) continue;
      const bool copied = reader == kByCopies;
      report({"async-race", shared_place(unit * kUnit), read.site, site, current_cta(),
              current_thread(),
              format("%s %s", who_writes, copied ? "what a copy still reads: nothing tells of its end"
                                                 : "a tile that is still being multiplied: nothing "
                                                   "tells of the end of the product")});
    }
  }
}

void note_read(const Span& span, unsigned reader, const TileRead& read) {
  Units& units = units_of(span.window, reader);
  for (size_t unit = span.begin / kUnit; unit <= (span.end - 1) / kUnit; ++unit) units[unit] = read;
}

bool is_same(const Access& a, const Access& b) { return memcmp(&a, &b, sizeof a) == 0; }

void blame(const Access& before, Site site, size_t offset, const std::string& what) {
  if (!is_news("async-race", before.site, site)) return;
  report({"async-race", shared_place(offset), before.site, site, current_cta(), current_thread(),
          what});
}

// Calls `each(cell, offset)` for the cells of some bytes that the running cluster has touched.
template <class Each>
void for_cells(const Span& span, Each each) {
  Region& region = device.ctas[span.window].shared;
  Cell* cell = cells_at(region, span.begin, span.end - span.begin);
  for (size_t at = span.begin; at < span.end; at += size_t(1) << region.granule) {
    each(*cell++, at);
  }
}

void check_seen(const Access& write, Reader kind, Site site, size_t at) {
  const Thread& self = *device.current;
  const char* reader = kind == Reader::kCopy ? "a copy by TMA" : "wgmma";
  if (write.agent >= static_cast<unsigned>(Agent::kFills)) {
    if (!ordered(write, self, true)) {
      blame(write, site, at,
            format("%s reads bytes that %s brings: the phase of the mbarrier that counts them is not "
                   "waited for, or not with a scope that includes who sent them",
                   reader, who(write).c_str()));
    } else if (!copy_sees(write, self, true)) {
      blame(write, site, at,
            format("%s reads bytes that %s has pushed, and no fence.proxy.async follows the wait for "
                   "them", reader, who(write).c_str()));
    }
    return;
  }
  if (!ordered(write, self, true)) {
    blame(write, site, at,
          format("%s reads bytes whose store no barrier orders before it", reader));
  } else if (!copy_sees(write, self, true)) {
    blame(write, site, at,
          format("%s reads bytes whose store no fence.proxy.async follows", reader));
  }
}
}  // namespace

void check_visible(const Span& span, Reader kind, Site site) {
  if (span.begin >= span.end) return;
  const Thread& self = *device.current;
  const Access* last = nullptr;
  for_cells(span, [&](const Cell& cell, size_t at) {
    if (last && is_same(cell.write, *last)) return;
    last = &cell.write;
    if (!is_empty(cell.write, self, true)) return check_seen(cell.write, kind, site, at);
    // Rows of a product that nobody needs may hold anything.
    if (kind == Reader::kProduct || !is_news("async-race", site, kNoSite)) return;
    report({"async-race", shared_place(at), site, kNoSite, current_cta(), current_thread(),
            "a copy by TMA reads bytes that nothing was stored to"});
  });
}

void check_overwritten(const Span& span, bool by_proxy, Site site) {
  const Thread& self = *device.current;
  const char* copy = by_proxy ? "a copy" : "a store to another CTA";
  check_tile_reads(span, site, by_proxy ? "a copy writes" : "a store writes");
  Access last;
  auto check = [&](const Access& before, bool wrote, size_t at) {
    if (is_empty(before, self, true)) return;
    const char* did = wrote ? "wrote" : "read by an ordinary load";
    if (!ordered(before, self, true, Due::kOver)) {
      blame(before, site, at, format("%s overwrites what %s %s, and nothing orders that before it",
                                     copy, who(before).c_str(), did));
    } else if (by_proxy && !copy_sees(before, self, true)) {
      blame(before, site, at,
            format("%s overwrites what %s %s that no fence.proxy.async follows", copy,
                   who(before).c_str(), did));
    }
  };
  for_cells(span, [&](const Cell& cell, size_t at) {
    if (!is_same(cell.write, last)) check(cell.write, true, at);
    last = cell.write;
    check(cell.reads[0], false, at);
    check(cell.reads[1], false, at);
  });
}

void note_filled(const Span& span, const Access& fill) {
  for_cells(span, [&](Cell& cell, size_t) {
    cell.write = fill;
    cell.reads[0].cluster = cell.reads[1].cluster = 0;
  });
}

void check_store(unsigned window, size_t offset, size_t bytes, Site site) {
  const Span written{window, offset, offset + bytes};
  const std::pair<Site, const char*> others[] = {
      {copy_into(written), "a store writes where a copy still writes"},
      {copy_out_of(written), "a store overwrites what a copy still reads"},
      {product_reads(written), "a store overwrites a tile that is still being multiplied"}};
  for (const auto& [other, what] : others) {
    if (other == kNoSite || !is_news("async-race", other, site)) continue;
    report({"async-race", shared_place(offset), other, site, current_cta(), current_thread(), what});
  }
  check_tile_reads(written, site, "a store overwrites");
}

void note_product_read(const Span& span, uint32_t number, Site site) {
  if (span.begin >= span.end) return;
  note_read(span, device.current->index() / kWarpgroup, {number, site, nullptr});
}

void note_copy_read(const Span& span, uint32_t number, Site site) {
  note_read(span, kByCopies, {number, site, device.current});
}

void clear_tile_reads() { tile_reads.clear(); }

}  // namespace emu
