#include "memory.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace emu {

Arena arena;

namespace {
constexpr size_t kPage = 4096;
constexpr size_t kWindowBytes = 1 << 20;  // usable part of a window, far above any device's limit
constexpr unsigned kMostPages = 4096;     // wild pages to lend before giving up
size_t shadow_bytes_of(size_t bytes) { return (bytes + 16) * sizeof(Cell); }

void* reserve(size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    fprintf(stderr, "cannot reserve %zu bytes of address space\n", bytes);
    exit(3);
  }
  return memory;
}

void open_memory(uint8_t* start, size_t bytes) {
  if (mprotect(start, (bytes + kPage - 1) / kPage * kPage, PROT_READ | PROT_WRITE)) {
    perror("mprotect");
    exit(3);
  }
}

// A stray access was reported before it happened; lending it a page lets the kernel go on.
void on_fault(int, siginfo_t* info, void*) {
  static unsigned pages = 0;
  auto* page = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(info->si_addr) & ~(kPage - 1));
  bool lent = false;
  if (device.current && pages++ < kMostPages) {
    if (page >= arena.base && page < arena.base + arena.bytes) {
      lent = mprotect(page, kPage, PROT_READ | PROT_WRITE) == 0;
    } else if (page) {
      lent = mmap(page, kPage, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == page;
    }
  }
  if (lent) {
    memset(page, kPoison, kPage);
    return;
  }
  if (!device.current) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  if (findings_count() == 0) {
    report({"crash", {}, kNoSite, kNoSite, current_cta(), current_thread(),
            format("the kernel touched address %p", info->si_addr)});
  }
  stop();
}
}  // namespace

void create_arena(unsigned arguments) {
  arena.bytes = size_t(kFirstArgumentSlot + arguments) << kSlotBits;
  arena.base = static_cast<uint8_t*>(reserve(arena.bytes, PROT_NONE));
}

void install_fault_handler() {
  static uint8_t stack[64 << 10];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void create_buffer(unsigned index) {
  Buffer& buffer = buffers[index];
  size_t middle = size_t(1) << (kSlotBits - 1);
  if (buffer.bytes > middle / 2) {
    fprintf(stderr, "a buffer of %zu bytes is too large to emulate\n", buffer.bytes);
    exit(3);
  }
  Region& region = buffer.region;
  region.argument = static_cast<int>(index);
  region.writable = buffer.role != Role::kInput;
  region.initialised = buffer.role == Role::kState;
  region.base = arena.slot(kFirstArgumentSlot + index) + middle;
  region.bytes = buffer.bytes;
  // A page on each side: near misses need no fault.
  open_memory(region.base - kPage, buffer.bytes + 2 * kPage);
  memset(region.base - kPage, kPoison, buffer.bytes + 2 * kPage);
  if (buffer.role == Role::kState) memset(region.base, 0, buffer.bytes);
}

void clear_buffers_shadow() {
  for (Buffer& buffer : buffers) {
    if (buffer.role == Role::kInput) continue;
    size_t bytes = shadow_bytes_of(buffer.bytes);
    if (buffer.region.cells) munmap(buffer.region.cells, bytes);
    buffer.region.cells = static_cast<Cell*>(reserve(bytes, PROT_READ | PROT_WRITE));
    buffer.region.granule = 4;
  }
}

void* reserve_memory(size_t bytes) { return reserve(bytes, PROT_READ | PROT_WRITE); }
void release_memory(void* start, size_t bytes) { munmap(start, bytes); }

void create_stacks(unsigned fibers) {
  open_memory(arena.slot(kStackSlot), fibers * kStackBytes);
  create_register_marks(fibers * kStackBytes);
}
uint8_t* stack_of(unsigned fiber) { return arena.slot(kStackSlot) + fiber * kStackBytes; }

void create_windows(unsigned ctas) {
  static std::vector<Cell*> shadows;
  while (shadows.size() < ctas) {
    open_memory(window_of(shadows.size()), kWindowBytes);
    shadows.push_back(
        static_cast<Cell*>(reserve(shadow_bytes_of(kWindowBytes), PROT_READ | PROT_WRITE)));
  }
  for (Cta& cta : device.ctas) {
    cta.shared = Region();
    cta.shared.base = window_of(cta.window);
    cta.shared.bytes = kWindowBytes;
    cta.shared.cells = shadows[cta.window];
  }
}

void poison_windows() {
  for (const Cta& cta : device.ctas) {
    memset(window_of(cta.window), kPoison, cta.cluster->grid->shared_end + kRedZone);
  }
}

const SharedArray* find_shared(size_t offset, size_t bytes) {
  for (const SharedArray& array : device.grid->arrays) {
    if (array.placed && offset >= array.offset && offset + bytes <= array.offset + array.bytes) {
      return &array;
    }
  }
  return nullptr;
}

Place shared_place(size_t offset) {
  const SharedArray* nearest = nullptr;
  for (const SharedArray& array : device.grid->arrays) {
    if (!array.placed) continue;
    if (!nearest || (offset >= array.offset && array.offset >= nearest->offset)) nearest = &array;
  }
  if (!nearest) return {-1, "", static_cast<long>(offset), true};
  return {-1, nearest->name, static_cast<long>(offset) - static_cast<long>(nearest->offset), true};
}

Place global_place(const void* pointer) {
  size_t at = static_cast<const uint8_t*>(pointer) - arena.base;
  unsigned slot = at >> kSlotBits;
  if (at >= arena.bytes || slot < kFirstArgumentSlot) return {};
  int index = static_cast<int>(slot - kFirstArgumentSlot);
  return {index, "", static_cast<const uint8_t*>(pointer) - buffers[index].region.base};
}

void refine(Region& region, unsigned granule) {
  size_t parts = size_t(1) << (region.granule - granule);
  size_t used = region.argument < 0 ? device.grid->shared_end : region.bytes;
  size_t count = (used >> region.granule) + 1;
  // Back to front: the parts of a cell never cover a cell that is still to be read.
  for (size_t cell = count; cell-- > 0;) {
    Cell whole = region.cells[cell];
    for (size_t part = 0; part < parts; ++part) region.cells[cell * parts + part] = whole;
  }
  region.granule = static_cast<int>(granule);
}

}  // namespace emu
