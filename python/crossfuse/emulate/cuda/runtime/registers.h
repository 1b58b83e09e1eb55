// Registers that wgmma uses (registers.cpp): accumulators and left operands, on stacks of threads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu {

constexpr unsigned kOperandRegisters = 4;

// What a product that is not waited for uses of one thread.
struct RegisterUse {
  size_t product = 0;          // its number in the thread
  uint32_t site = 0;           // its statement
  uint64_t shape = 0;
  uint32_t fence = 0;          // the last fence of the thread when it was issued
  std::vector<size_t> sums, left;  // words of the stacks
};
struct Registers {
  uint32_t fence = 0;  // the thread's last wgmma.fence, by the count of all; 0 if there was none
  uint32_t fence_before = 0, fence_site = 0;  // the one before; the statement of the last one
  std::vector<RegisterUse> uses;
};

void create_register_marks(size_t stacks_bytes);
// An ordinary access to the stacks, from an offset on.
void touch_registers(size_t offset, size_t bytes, bool writes, uint32_t site);
// A product of the running thread begins to use registers; `left` may be null.
void use_registers(RegisterUse use, float* const* sums, size_t count, unsigned* const* left);
// Products before number `until` have been waited for.
void end_uses(size_t until);
// The thread is at its end: products in flight write what is gone.
void check_uses_at_end();

}  // namespace emu
