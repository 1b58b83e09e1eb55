// Warp-wide operations: values travel as 64-bit words through the runtime.
#pragma once

template <class T>
CROSSFUSE_LEAF unsigned long long crossfuse_to_word(T value) {
  static_assert(sizeof(T) <= 8, "a shuffled value has at most 8 bytes");
  unsigned long long word = 0;
  __builtin_memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
CROSSFUSE_LEAF T crossfuse_from_word(unsigned long long word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
CROSSFUSE_LEAF T crossfuse_shuffle(unsigned mask, T value, unsigned source) {
  return crossfuse_from_word<T>(
      crossfuse_emulate_warp_shuffle(mask, crossfuse_to_word(value), source));
}

// `width` splits the warp into sections; a source outside the section is the lane itself.
template <class T>
CROSSFUSE_LEAF T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  unsigned lane = crossfuse_emulate_thread_rank() % 32, w = static_cast<unsigned>(width);
  return crossfuse_shuffle(mask, value, (lane & ~(w - 1)) + (static_cast<unsigned>(source) & (w - 1)));
}
template <class T>
CROSSFUSE_LEAF T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = crossfuse_emulate_thread_rank() % 32, w = static_cast<unsigned>(width);
  unsigned source = (lane & (w - 1)) + delta < w ? lane + delta : lane;
  return crossfuse_shuffle(mask, value, source);
}
template <class T>
CROSSFUSE_LEAF T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned lane = crossfuse_emulate_thread_rank() % 32, w = static_cast<unsigned>(width);
  unsigned source = (lane & (w - 1)) >= delta ? lane - delta : lane;
  return crossfuse_shuffle(mask, value, source);
}
template <class T>
CROSSFUSE_LEAF T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  unsigned lane = crossfuse_emulate_thread_rank() % 32, w = static_cast<unsigned>(width);
  unsigned source = lane ^ static_cast<unsigned>(lanes);
  return crossfuse_shuffle(mask, value, source / w > lane / w ? lane : source);
}

CROSSFUSE_LEAF unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const unsigned other = __shfl_xor_sync(mask, value, lanes);
    value = other > value ? other : value;
  }
  return value;
}

CROSSFUSE_LEAF void __syncwarp(unsigned mask = 0xFFFFFFFFu) { crossfuse_emulate_warp_sync(mask); }
CROSSFUSE_LEAF unsigned __activemask() { return crossfuse_emulate_active_mask(); }
CROSSFUSE_LEAF unsigned __ballot_sync(unsigned mask, int predicate) {
  return crossfuse_emulate_warp_ballot(mask, predicate);
}
CROSSFUSE_LEAF int __any_sync(unsigned mask, int predicate) {
  return crossfuse_emulate_warp_ballot(mask, predicate) != 0;
}
CROSSFUSE_LEAF int __all_sync(unsigned mask, int predicate) {
  return crossfuse_emulate_warp_ballot(mask, !predicate) == 0;
}
