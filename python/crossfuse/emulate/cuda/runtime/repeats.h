// Stores of bits that a place holds already: CTAs that help make what others make later once more.
#pragma once
#include "state.h"

namespace emu {

// A store of the running thread that has not been done yet, to a place that others touched without
// any order: whether it changes anything is seen at the next look.
struct Unsettled {
  Region* region = nullptr;
  size_t offset = 0;
  std::vector<uint8_t> before;
  Site site = kNoSite;
};
extern Unsettled unsettled;

// Notes that somebody stored once more what bytes held.
void add_repeat(const uint8_t* byte, size_t bytes, const Access& now);
// All who did, of the word that a byte belongs to; null if nobody.
const std::vector<Access>* find_repeats(const uint8_t* byte);
void forget_repeats(const uint8_t* byte);
void clear_repeats();

}  // namespace emu
