// What a launch was to write, and did not.
#include "findings.h"
#include "shadow.h"

namespace emu {

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
