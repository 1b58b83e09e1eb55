#include "additions.h"

namespace emu {

namespace {
std::unordered_map<uintptr_t, Sum> sums;  // by the number of the word

uintptr_t word_of(const uint8_t* byte) { return reinterpret_cast<uintptr_t>(byte) / kWord; }
}  // namespace

Sum& sum_at(const uint8_t* byte) { return sums[word_of(byte)]; }

const Sum* find_sum(const uint8_t* byte) {
  if (sums.empty()) return nullptr;
  auto found = sums.find(word_of(byte));
  return found == sums.end() ? nullptr : &found->second;
}

void forget_sum(const uint8_t* byte) { sums.erase(word_of(byte)); }
void clear_sums() { sums.clear(); }

}  // namespace emu
