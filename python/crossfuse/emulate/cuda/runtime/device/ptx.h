// PTX instructions of the Hopper pipeline, as the translated helpers of generated text call them.
#pragma once
#include "small_float.h"

CROSSFUSE_LEAF unsigned __cvta_generic_to_shared(const void* pointer) {
  return crossfuse_emulate_shared_address(pointer);
}

// Two float32 to one register; the first operand goes to the upper half.
template <class Format>
CROSSFUSE_LEAF unsigned crossfuse_ptx_pack(float high, float low) {
  unsigned upper = crossfuse_emulated::encode<Format>(high);
  return upper << 16 | crossfuse_emulated::encode<Format>(low);
}
