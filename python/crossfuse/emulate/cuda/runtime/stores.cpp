// Ordinary accesses of shared memory by instructions with addresses of their own: vectors, matrices of a
// warp; and the fence between them and copies.
#include <cstring>

#include "async.h"
#include "schedule.h"
#include "shadow.h"

namespace emu {

namespace {
// An ordinary store to a place that a shared address means.
void store_words(unsigned window, size_t offset, const void* values, size_t bytes, Site site) {
  if (!remote_access(device.ctas[window], offset, bytes, Mode::kWrite, site)) return;
  memcpy(window_of(window) + offset, values, bytes);
}
}  // namespace

}  // namespace emu

extern "C" {
void crossfuse_emulate_fence_async(int space) {
  using namespace emu;
  note_use(CROSSFUSE_SITE, true);
  fence_clock(space != CROSSFUSE_SHARED, space != CROSSFUSE_GLOBAL);
  if (space != CROSSFUSE_GLOBAL) publish_barriers(false);
}

// Lane l names row l % 8 of matrix l / 8; each lane holds two elements of every matrix.
void crossfuse_emulate_store_matrices(unsigned address, const unsigned* registers, unsigned count) {
  using namespace emu;
  Site site = CROSSFUSE_SITE;
  Thread& self = *device.current;
  const uint64_t* rows = meet(~0u, address, site, false);
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

void crossfuse_emulate_load_shared(unsigned address, void* values, unsigned bytes) {
  using namespace emu;
  unsigned window = 0;
  size_t offset = 0;
  if (!locate(address, window, offset)) return;
  if (!remote_access(device.ctas[window], offset, bytes, Mode::kRead, CROSSFUSE_SITE)) return;
  memcpy(values, window_of(window) + offset, bytes);
}
}
