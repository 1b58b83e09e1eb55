// Stands in for CUDA's header of the same name: fp8 storage types and their conversions.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "device.h"
#include "small_float.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;

using __nv_fp8_e4m3 = crossfuse_emulated::Storage<crossfuse_emulated::E4m3>;
using __nv_fp8_e5m2 = crossfuse_emulated::Storage<crossfuse_emulated::E5m2>;

// An exponent alone: 2^(x - 127), 0xFF is NaN. Read only.
struct __nv_fp8_e8m0 {
  __nv_fp8_storage_t __x;
  explicit operator float() const {
    if (__x == 0xFF) return crossfuse_emulated::bits_float(0x7FC00000u);
    return crossfuse_emulated::bits_float(__x ? uint32_t(__x) << 23 : 0x00400000u);
  }
};

namespace crossfuse_emulated {

template <class One>
inline float lane_of(unsigned word, int lane) {
  One one;
  one.__x = static_cast<unsigned char>(word >> (8 * lane));
  return static_cast<float>(one);
}

template <class One>
struct Storage2 {
  __nv_fp8x2_storage_t __x;

  Storage2() = default;
  explicit Storage2(float2 value)
      : __x(static_cast<__nv_fp8x2_storage_t>(One(value.x).__x | One(value.y).__x << 8)) {}
  explicit Storage2(__half2 value) : Storage2(__half22float2(value)) {}
  explicit Storage2(__nv_bfloat162 value) : Storage2(__bfloat1622float2(value)) {}
  explicit operator float2() const { return {lane_of<One>(__x, 0), lane_of<One>(__x, 1)}; }
  explicit operator __half2() const { return {lane_of<One>(__x, 0), lane_of<One>(__x, 1)}; }
  explicit operator __nv_bfloat162() const { return {lane_of<One>(__x, 0), lane_of<One>(__x, 1)}; }
};

template <class One>
struct Storage4 {
  __nv_fp8x4_storage_t __x;

  Storage4() = default;
  explicit Storage4(float4 value)
      : __x(One(value.x).__x | One(value.y).__x << 8 | One(value.z).__x << 16 |
            static_cast<unsigned>(One(value.w).__x) << 24) {}
  explicit operator float4() const {
    return {lane_of<One>(__x, 0), lane_of<One>(__x, 1), lane_of<One>(__x, 2), lane_of<One>(__x, 3)};
  }
};

}  // namespace crossfuse_emulated

using __nv_fp8x2_e4m3 = crossfuse_emulated::Storage2<__nv_fp8_e4m3>;
using __nv_fp8x2_e5m2 = crossfuse_emulated::Storage2<__nv_fp8_e5m2>;
using __nv_fp8x4_e4m3 = crossfuse_emulated::Storage4<__nv_fp8_e4m3>;
using __nv_fp8x4_e5m2 = crossfuse_emulated::Storage4<__nv_fp8_e5m2>;
struct __nv_fp8x2_e8m0 {
  __nv_fp8x2_storage_t __x;
};
struct __nv_fp8x4_e8m0 {
  __nv_fp8x4_storage_t __x;
};
