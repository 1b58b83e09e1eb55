// Floating point formats narrower than f32, bit-exact and rounding to nearest, ties to even.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

namespace crossfuse_emulated {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// One format: `finite` is the largest finite pattern, `overflow` what larger magnitudes become,
// `nan` the pattern NaN becomes. Patterns are without sign. `has_infinity` says whether an all-ones
// exponent means infinity or NaN (IEEE) or an ordinary number (e4m3, where only `nan` is NaN).
struct Half {
  using Bits = uint16_t;
  static constexpr int exponent = 5, mantissa = 10;
  static constexpr uint32_t finite = 0x7BFF, overflow = 0x7C00, nan = 0x7FFF;
  static constexpr bool has_infinity = true;
};
struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr int exponent = 8, mantissa = 7;
  static constexpr uint32_t finite = 0x7F7F, overflow = 0x7F80, nan = 0x7FFF;
  static constexpr bool has_infinity = true;
};
// CUDA's fp8 constructors saturate: infinities and large values become the largest finite value.
struct E4m3 {
  using Bits = uint8_t;
  static constexpr int exponent = 4, mantissa = 3;
  static constexpr uint32_t finite = 0x7E, overflow = 0x7E, nan = 0x7F;
  static constexpr bool has_infinity = false;
};
struct E5m2 {
  using Bits = uint8_t;
  static constexpr int exponent = 5, mantissa = 2;
  static constexpr uint32_t finite = 0x7B, overflow = 0x7B, nan = 0x7F;
  static constexpr bool has_infinity = true;
};

template <class Format>
inline typename Format::Bits encode(float value) {
  constexpr int bias = (1 << (Format::exponent - 1)) - 1;
  uint32_t magnitude = float_bits(value) & 0x7FFFFFFFu;
  uint32_t result = Format::nan;
  uint32_t sign = (float_bits(value) >> 31) << (Format::exponent + Format::mantissa);
  if (magnitude > 0x7F800000u) return static_cast<typename Format::Bits>(result);
  uint32_t field = magnitude >> 23;
  int exponent = static_cast<int>(field ? field : 1) - 127 + bias;
  uint32_t mantissa = (magnitude & 0x7FFFFFu) | (field ? 0x800000u : 0u);
  int shift = 23 - Format::mantissa + (exponent <= 0 ? 1 - exponent : 0);
  if (shift > 25) shift = 25;
  uint32_t rounded = mantissa >> shift, rest = mantissa & ((1u << shift) - 1);
  uint32_t halfway = 1u << (shift - 1);
  rounded += rest > halfway || (rest == halfway && (rounded & 1));
  // `rounded` still holds the implicit bit, so adding it to exponent - 1 carries where it must.
  result = (static_cast<uint32_t>(exponent > 0 ? exponent - 1 : 0) << Format::mantissa) + rounded;
  if (result > Format::finite) result = Format::overflow;
  return static_cast<typename Format::Bits>(result | sign);
}

template <class Format>
inline float decode(typename Format::Bits bits) {
  constexpr int bias = (1 << (Format::exponent - 1)) - 1;
  constexpr uint32_t top = (1u << Format::exponent) - 1;
  uint32_t magnitude = bits & ((1u << (Format::exponent + Format::mantissa)) - 1);
  uint32_t sign = static_cast<uint32_t>(bits) >> (Format::exponent + Format::mantissa) << 31;
  uint32_t field = magnitude >> Format::mantissa, mantissa = magnitude & ((1u << Format::mantissa) - 1);
  if (!Format::has_infinity && magnitude == Format::nan) return bits_float(sign | 0x7FC00000u);
  if (Format::has_infinity && field == top)
    return bits_float(sign | 0x7F800000u | mantissa << (23 - Format::mantissa));
  if (field == 0 && Format::exponent < 8) {
    // Subnormal: mantissa * 2^(1 - bias - mantissa bits), exact in f32.
    float value = static_cast<float>(mantissa) * bits_float(uint32_t(128 - bias - Format::mantissa) << 23);
    return sign ? -value : value;
  }
  return bits_float(sign | ((field + (127 - bias)) << 23 | mantissa << (23 - Format::mantissa)));
}

// f16 and bf16: arithmetic in f32, rounded after each operation. f32 has more than 2p + 2 bits for
// both, so the results of + - * / and sqrt are those of one correctly rounded operation.
template <class Format>
struct Number {
  typename Format::Bits __x;

  Number() = default;
  template <class From, class = decltype(static_cast<float>(std::declval<const From&>())),
            class = std::enable_if_t<!std::is_same_v<From, Number>>>
  Number(const From& value) : __x(encode<Format>(static_cast<float>(value))) {}
  operator float() const { return decode<Format>(__x); }

  static Number from_bits(typename Format::Bits bits) {
    Number number;
    number.__x = bits;
    return number;
  }
  Number operator-() const {
    return from_bits(static_cast<typename Format::Bits>(__x ^ 0x8000u));
  }
  Number operator+() const { return *this; }

#define CROSSFUSE_ARITHMETIC(op)                                                           \
  friend Number operator op(const Number& a, const Number& b) { return float(a) op float(b); } \
  Number& operator op##=(const Number& other) { return *this = *this op other; }
  CROSSFUSE_ARITHMETIC(+)
  CROSSFUSE_ARITHMETIC(-)
  CROSSFUSE_ARITHMETIC(*)
  CROSSFUSE_ARITHMETIC(/)
#undef CROSSFUSE_ARITHMETIC
#define CROSSFUSE_COMPARISON(op) \
  friend bool operator op(const Number& a, const Number& b) { return float(a) op float(b); }
  CROSSFUSE_COMPARISON(<)
  CROSSFUSE_COMPARISON(>)
  CROSSFUSE_COMPARISON(<=)
  CROSSFUSE_COMPARISON(>=)
  CROSSFUSE_COMPARISON(==)
  CROSSFUSE_COMPARISON(!=)
#undef CROSSFUSE_COMPARISON
};

// fp8: storage only, conversions are explicit as in CUDA.
template <class Format>
struct Storage {
  typename Format::Bits __x;

  Storage() = default;
  template <class From, class = decltype(static_cast<float>(std::declval<const From&>())),
            class = std::enable_if_t<!std::is_same_v<From, Storage>>>
  explicit Storage(const From& value) : __x(encode<Format>(static_cast<float>(value))) {}
  explicit operator float() const { return decode<Format>(__x); }
};

}  // namespace crossfuse_emulated
