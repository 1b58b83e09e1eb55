// What runs beside the threads: mbarriers, TMA, wgmma; named barriers; flags.
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
// The same of values that an mbarrier of that CTA will count. Who waits for the phase that counts them
// knows that they need the CTA no more.
void note_push(unsigned window, size_t barrier, size_t offset, Site site);

// ---- mbarriers
// A copy is about to complete bytes there, by the asynchronous proxy if it is one of TMA: the running
// thread comes after the initialisation, and so does the proxy.
void check_barrier(unsigned window, size_t offset, bool by_proxy, Site site);
// How what completes bytes of a barrier now is known to be over: by its phase.
void count_by(unsigned window, size_t offset, Access& fill);
// Bytes of a copy of `issuer`; of a load it is the load of this number. What was past when it was issued
// is so for whoever waits for it.
void complete_bytes(unsigned window, size_t offset, long bytes, Site site, const Thread& issuer,
                    Agent agent, uint32_t number, const Clock& past);
// What the running thread has initialised is visible to copies, and with `to_cluster` behind the cluster
// barriers that follow.
void publish_barriers(bool to_cluster);
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
// The running thread is at its end: what its copies still read is gone when its CTA exits.
void check_stores_at_end();
// The statement of a copy that writes (or reads) these bytes now, or kNoSite.
Site copy_into(const Span& span);
Site copy_out_of(const Span& span);
void clear_copies();

// ---- products in flight
// Lets some of them be done, those of a warpgroup in turn.
void advance_products();
Site product_reads(const Span& span);
void clear_products();

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
