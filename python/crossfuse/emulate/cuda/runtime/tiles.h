// What copies and products read and fill in shared memory (tiles.cpp).
#pragma once
#include "async.h"

namespace emu {

enum class Reader : uint8_t { kCopy, kProduct };
// A copy or product of the running thread reads: all stores there come before, and it sees them.
void check_visible(const Span& span, Reader kind, Site site);
// One of its copies or pushes will write: whatever touched these bytes is over, and, before a copy, has a
// proxy fence behind it.
void check_overwritten(const Span& span, bool by_proxy, Site site);
void note_filled(const Span& span, const Access& fill);
// An ordinary store about to be made, where a copy or a product still reads.
void check_store(unsigned window, size_t offset, size_t bytes, Site site);
// Product `number` of the warpgroup, or the copies of group `number` of the thread, read these bytes.
void note_product_read(const Span& span, uint32_t number, Site site);
void note_copy_read(const Span& span, uint32_t number, Site site);
void clear_tile_reads();

}  // namespace emu
