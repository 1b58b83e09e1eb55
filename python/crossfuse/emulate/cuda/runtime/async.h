// What runs beside the threads: mbarriers, TMA, wgmma, named barriers, and the proxy fences between
// ordinary stores and TMA.
#pragma once
#include <map>

#include "state.h"

namespace emu {

// Bytes [begin, end) of the shared memory window of a CTA.
struct Span {
  unsigned window = 0;
  size_t begin = 0, end = 0;
  bool meets(const Span& other) const {
    return window == other.window && begin < other.end && other.begin < end;
  }
};

// The window that a shared address of the running thread means, and the offset in it. False: a
// refused address.
bool locate(unsigned address, unsigned& window, size_t& offset);
// Notes that this thread reaches into another CTA (peer-not-started, early-exit).
void note_peer(unsigned window, size_t offset, Site site);
// The same of values that an mbarrier of that CTA will count; and that they have arrived. Who waits
// for the phase that counts them knows that they need the CTA no more.
void note_push(unsigned window, size_t barrier, size_t offset, Site site);
void note_pushed(unsigned window, size_t barrier);

// ---- mbarriers
// The barrier that a load completes learns from `issuer`, if not null, that its load is over.
void complete_bytes(unsigned window, size_t offset, long bytes, Site site, const Thread* issuer,
                    uint32_t number);
// What a thread waits for, for reports.
std::string standing_at_barrier(const Thread& thread);
// Whether the phase that a thread waits for is complete.
bool is_past_barrier(const Thread& thread);
void clear_barriers();
// Bytes that were announced or arrived in vain.
void check_barriers_at_end(const Cluster& cluster);
// Values that arrived while nobody waited for them, before a CTA exits.
void check_pushes_at_end(const Cluster& cluster);

// ---- copies in flight
// Lets some copies finish; all that can if `forced`. False if none was in flight.
bool advance_copies(bool forced);
void check_copies_at_end(const Cluster& cluster);
// The statement of a copy that writes (or reads) these bytes now, or kNoSite.
Site copy_into(const Span& span);
Site copy_out_of(const Span& span);
void clear_copies();

// ---- products in flight
// Lets some of them be done, those of a warpgroup in turn.
void advance_products();
Site product_reads(const Span& span);
void clear_products();

// ---- ordinary stores that TMA or wgmma will read
// One about to be made, where a copy or a product still reads.
void check_store(unsigned window, size_t offset, size_t bytes, Site site);
void note_generic_store(size_t offset, size_t bytes);
// All threads of a barrier have met: what they fenced is visible to the async proxy.
void publish_stores(const std::vector<Thread*>& threads);
enum class Reader : uint8_t { kCopy, kProduct };
void check_visible(const Span& span, Reader kind, Site site);
// An ordinary load, and a copy about to overwrite what was loaded: the load may still be on its way
// unless its thread has passed a proxy fence since.
void note_generic_load(unsigned window, size_t offset, size_t bytes, Site site);
void check_loaded(const Span& span, Site site);
// Other than ordinary stores have filled these bytes.
void note_filled(const Span& span);
void clear_visibility();

void clear_named_barriers();

// ---- flags in global memory
void clear_flags();
std::string standing_at_flag(const Thread& thread);
// A relaxed access: it orders nothing by itself, but together with fences.
void relaxed_read(const void* flag);
void relaxed_write(const void* flag);
// Wakes threads whose flag has changed; all that poll if `forced`. False if there was none.
bool wake_pollers(bool forced);
// Wakes those whose warp waits for them: it must not sleep until all flags that its lanes read have
// changed. Called when somebody has got further.
void wake_voters();

}  // namespace emu
