// Stands in for CUDA's header of the same name: bf16 on top of small_float.h.
#pragma once
#include "device.h"
#include "half_functions.h"
#include "small_float.h"

using __nv_bfloat16 = crossfuse_emulated::Number<crossfuse_emulated::Bfloat16>;
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(const __nv_bfloat16& x, const __nv_bfloat16& y) : x(x), y(y) {}
};
using nv_bfloat162 = __nv_bfloat162;

static inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
static inline __nv_bfloat16 __double2bfloat16(double value) { return static_cast<float>(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return value; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16::from_bits(bits);
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 value) { return {value.x, value.y}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {value.x, value.y}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value) { return value.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value) { return value.y; }
static inline float __low2float(__nv_bfloat162 value) { return value.x; }
static inline float __high2float(__nv_bfloat162 value) { return value.y; }

CROSSFUSE_HALF_FUNCTIONS(__nv_bfloat16, __nv_bfloat162)
