// The functions that f16 and bf16 share, as one list: CUDA spells them alike and overloads them.
#pragma once
#include <cmath>

#define CROSSFUSE_HALF_UNARY(type, name, expression) \
  static inline type name(type value) {              \
    float v = value;                                 \
    return static_cast<type>(expression);            \
  }
#define CROSSFUSE_HALF_BINARY(type, name, expression) \
  static inline type name(type left, type right) {    \
    float a = left, b = right;                        \
    return static_cast<type>(expression);             \
  }
#define CROSSFUSE_HALF_COMPARE(type, name, op) \
  static inline bool name(type a, type b) { return a op b; }
#define CROSSFUSE_HALF_PAIR(type, type2, name, one) \
  static inline type2 name(type2 a, type2 b) { return {one(a.x, b.x), one(a.y, b.y)}; }

#define CROSSFUSE_HALF_FUNCTIONS(type, type2)                          \
  CROSSFUSE_HALF_UNARY(type, hexp, expf(v))                            \
  CROSSFUSE_HALF_UNARY(type, hexp2, exp2f(v))                          \
  CROSSFUSE_HALF_UNARY(type, hexp10, powf(10.0f, v))                   \
  CROSSFUSE_HALF_UNARY(type, hlog, logf(v))                            \
  CROSSFUSE_HALF_UNARY(type, hlog2, log2f(v))                          \
  CROSSFUSE_HALF_UNARY(type, hlog10, log10f(v))                        \
  CROSSFUSE_HALF_UNARY(type, hsqrt, sqrtf(v))                          \
  CROSSFUSE_HALF_UNARY(type, hrsqrt, 1.0f / sqrtf(v))                  \
  CROSSFUSE_HALF_UNARY(type, hrcp, 1.0f / v)                           \
  CROSSFUSE_HALF_UNARY(type, hsin, sinf(v))                            \
  CROSSFUSE_HALF_UNARY(type, hcos, cosf(v))                            \
  CROSSFUSE_HALF_UNARY(type, htanh, tanhf(v))                          \
  CROSSFUSE_HALF_UNARY(type, hfloor, floorf(v))                        \
  CROSSFUSE_HALF_UNARY(type, hceil, ceilf(v))                          \
  CROSSFUSE_HALF_UNARY(type, htrunc, truncf(v))                        \
  CROSSFUSE_HALF_UNARY(type, hrint, rintf(v))                          \
  CROSSFUSE_HALF_UNARY(type, __habs, fabsf(v))                         \
  CROSSFUSE_HALF_BINARY(type, __hadd, a + b)                           \
  CROSSFUSE_HALF_BINARY(type, __hsub, a - b)                           \
  CROSSFUSE_HALF_BINARY(type, __hmul, a * b)                           \
  CROSSFUSE_HALF_BINARY(type, __hdiv, a / b)                           \
  CROSSFUSE_HALF_BINARY(type, __hmax, fmaxf(a, b))                     \
  CROSSFUSE_HALF_BINARY(type, __hmin, fminf(a, b))                     \
  CROSSFUSE_HALF_COMPARE(type, __hgt, >)                               \
  CROSSFUSE_HALF_COMPARE(type, __hge, >=)                              \
  CROSSFUSE_HALF_COMPARE(type, __hlt, <)                               \
  CROSSFUSE_HALF_COMPARE(type, __hle, <=)                              \
  CROSSFUSE_HALF_COMPARE(type, __heq, ==)                              \
  CROSSFUSE_HALF_COMPARE(type, __hne, !=)                              \
  static inline type __hneg(type value) { return -value; }             \
  static inline bool __hisnan(type value) { return value != value; }   \
  static inline bool __hisinf(type value) { return __builtin_isinf(float(value)); } \
  static inline type __hfma(type a, type b, type c) {                  \
    return static_cast<type>(fmaf(a, b, c));                           \
  }                                                                    \
  CROSSFUSE_HALF_PAIR(type, type2, __hadd2, __hadd)                    \
  CROSSFUSE_HALF_PAIR(type, type2, __hsub2, __hsub)                    \
  CROSSFUSE_HALF_PAIR(type, type2, __hmul2, __hmul)                    \
  CROSSFUSE_HALF_PAIR(type, type2, __hmax2, __hmax)                    \
  CROSSFUSE_HALF_PAIR(type, type2, __hmin2, __hmin)                    \
  static inline type2 __hfma2(type2 a, type2 b, type2 c) {             \
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};             \
  }
