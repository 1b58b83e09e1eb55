#include "repeats.h"

namespace emu {

namespace {
constexpr size_t kRepeated = 4;  // bytes of a word
std::unordered_map<uintptr_t, std::vector<Access>> repeats;  // by the number of the word

uintptr_t repeated_word(const uint8_t* byte) {
  return reinterpret_cast<uintptr_t>(byte) / kRepeated;
}
}  // namespace

Unsettled unsettled;

void add_repeat(const uint8_t* byte, size_t bytes, const Access& now) {
  const uintptr_t end = repeated_word(byte + bytes - 1);
  for (uintptr_t word = repeated_word(byte); word <= end; ++word) repeats[word].push_back(now);
}

const std::vector<Access>* find_repeats(const uint8_t* byte) {
  if (repeats.empty()) return nullptr;
  auto found = repeats.find(repeated_word(byte));
  return found == repeats.end() ? nullptr : &found->second;
}

void forget_repeats(const uint8_t* byte) { repeats.erase(repeated_word(byte)); }

void clear_repeats() {
  repeats.clear();
  unsettled = Unsettled();
}

}  // namespace emu
