// Where emulated memory lies: one reserved stretch of address space, cut into slots with wide
// unmapped margins, so that a wild address is recognised and never hits the emulator itself.
#pragma once
#include "findings.h"
#include "state.h"

namespace emu {

constexpr unsigned kSlotBits = 36;         // 64 GiB for each buffer: no 32-bit index leaves it
constexpr unsigned kWindowBits = 24;       // 16 MiB for the shared memory window of each CTA
constexpr size_t kWindowStart = 4096;      // offset of the first shared byte within its window
constexpr size_t kRedZone = 1024;          // bytes between shared arrays
constexpr size_t kStackBytes = 256 << 10;  // of one fiber
constexpr uint8_t kPoison = 0xFF;          // NaN in every floating point format but fp8 e8m0

enum Slot : unsigned { kSharedSlot, kStackSlot, kFirstArgumentSlot };

struct Arena {
  uint8_t* base = nullptr;
  size_t bytes = 0;
  uint8_t* slot(unsigned index) const { return base + (size_t(index) << kSlotBits); }
};
extern Arena arena;

void create_arena(unsigned arguments);
void install_fault_handler();
// Makes the memory of buffer `index` and, if it may be written, its shadow.
void create_buffer(unsigned index);
void clear_buffers_shadow();
// Where an address lies within a buffer, if it does.
Place global_place(const void* pointer);
void create_stacks(unsigned fibers);
// Zeros that take no memory before they are written; and what gives them back.
void* reserve_memory(size_t bytes);
void release_memory(void* start, size_t bytes);
uint8_t* stack_of(unsigned fiber);
// Shared windows of the CTAs that run at the same time: created for a launch, poisoned whenever
// clusters start.
void create_windows(unsigned ctas);
void poison_windows();
inline uint8_t* window_of(unsigned window) {
  return arena.slot(kSharedSlot) + (size_t(window) << kWindowBits);
}

// The array that holds [offset, offset + bytes) of a window, or null.
const SharedArray* find_shared(size_t offset, size_t bytes);
Place shared_place(size_t offset);
void refine(Region& region, unsigned granule);

}  // namespace emu
