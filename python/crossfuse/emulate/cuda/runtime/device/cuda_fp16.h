// Stands in for CUDA's header of the same name: f16 on top of small_float.h.
#pragma once
#include "device.h"
#include "half_functions.h"
#include "small_float.h"

using __half = crossfuse_emulated::Number<crossfuse_emulated::Half>;
using half = __half;

struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(const __half& x, const __half& y) : x(x), y(y) {}
};
using half2 = __half2;

static inline __half __float2half(float value) { return value; }
static inline __half __float2half_rn(float value) { return value; }
static inline __half __double2half(double value) { return static_cast<float>(value); }
static inline float __half2float(__half value) { return value; }
static inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
static inline unsigned short __half_as_ushort(__half value) { return value.__x; }
static inline __half2 make_half2(__half x, __half y) { return {x, y}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __half2half2(__half value) { return {value, value}; }
static inline __half2 __float2half2_rn(float value) { return {value, value}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline __half2 __float22half2_rn(float2 value) { return {value.x, value.y}; }
static inline float2 __half22float2(__half2 value) { return {value.x, value.y}; }
static inline __half __low2half(__half2 value) { return value.x; }
static inline __half __high2half(__half2 value) { return value.y; }
static inline float __low2float(__half2 value) { return value.x; }
static inline float __high2float(__half2 value) { return value.y; }

CROSSFUSE_HALF_FUNCTIONS(__half, __half2)
