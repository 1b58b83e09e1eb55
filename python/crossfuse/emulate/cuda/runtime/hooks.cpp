// The compiler's instrumentation (-fsanitize=thread,alignment) calls these before every access to
// memory that may be shared, instead of the sanitizers' own libraries.
#include <cstring>

#include "async.h"
#include "shadow.h"

using namespace emu;

#define CROSSFUSE_HOOKS(bytes)                                                               \
  void __tsan_read##bytes(void* p) { access(p, bytes, Mode::kRead, CROSSFUSE_SITE); }        \
  void __tsan_write##bytes(void* p) { access(p, bytes, Mode::kWrite, CROSSFUSE_SITE); }      \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, Mode::kRead, CROSSFUSE_SITE); } \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, Mode::kWrite, CROSSFUSE_SITE); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void**, void*) {}
CROSSFUSE_HOOKS(1)
CROSSFUSE_HOOKS(2)
CROSSFUSE_HOOKS(4)
CROSSFUSE_HOOKS(8)
CROSSFUSE_HOOKS(16)
void __tsan_read_range(void* p, unsigned long bytes) {
  access(p, bytes, Mode::kRead, CROSSFUSE_SITE);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  access(p, bytes, Mode::kWrite, CROSSFUSE_SITE);
}

struct UbsanMismatch {
  struct {
    const char* file;
    uint32_t line, column;
  } location;
  const void* type;
  unsigned char log_alignment, kind;
};

void __ubsan_handle_type_mismatch_v1(UbsanMismatch* data, unsigned long pointer) {
  Site site = CROSSFUSE_SITE;
  if (!device.current || !is_news("misaligned", site, kNoSite)) return;
  Place place = global_place(reinterpret_cast<const void*>(pointer));
  size_t at = reinterpret_cast<const uint8_t*>(pointer) - arena.base;
  if (at < arena.bytes && at >> kSlotBits == kSharedSlot) {
    place = shared_place(at & ((size_t(1) << kWindowBits) - 1));
  }
  report({"misaligned", place, site, kNoSite, current_cta(), current_thread(),
          format("the access needs an alignment of %u bytes", 1u << data->log_alignment)});
}

void __ubsan_handle_out_of_bounds(void*, unsigned long index) {
  Site site = CROSSFUSE_SITE;
  if (!device.current || !is_news("out-of-bounds", site, kNoSite)) return;
  report({"out-of-bounds", {}, site, kNoSite, current_cta(), current_thread(),
          format("index %lu lies beyond a thread's own array", index)});
}

void crossfuse_emulate_atomic(void* pointer, unsigned bytes) {
  access(pointer, bytes, Mode::kAtomic, CROSSFUSE_SITE);
  relaxed_read(pointer);
  relaxed_write(pointer);
}
void crossfuse_emulate_copy(void* to, const void* from, unsigned long bytes) {
  access(from, bytes, Mode::kRead, CROSSFUSE_SITE);
  access(to, bytes, Mode::kWrite, CROSSFUSE_SITE);
  memmove(to, from, bytes);
}
void crossfuse_emulate_fill(void* to, int value, unsigned long bytes) {
  access(to, bytes, Mode::kWrite, CROSSFUSE_SITE);
  memset(to, value, bytes);
}
void crossfuse_emulate_trap() {
  report({"crash", {}, CROSSFUSE_SITE, kNoSite, current_cta(), current_thread(),
          "the kernel called __trap"});
  stop();
}
}
