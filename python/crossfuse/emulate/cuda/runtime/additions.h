// Copies that add to numbers in global memory: all of them, since none orders the others.
#pragma once
#include "state.h"

namespace emu {

constexpr size_t kWord = 4;  // bytes of a number that is added to

struct Sum {
  Access before;  // what wrote the number before anything was added
  std::vector<Access> added;
};

// The sum that a byte belongs to; begun if there is none.
Sum& sum_at(const uint8_t* byte);
// The same; null if there is none.
const Sum* find_sum(const uint8_t* byte);
void forget_sum(const uint8_t* byte);
void clear_sums();

}  // namespace emu
