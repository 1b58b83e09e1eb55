// Mathematical and bit intrinsics. The approximate ones are computed exactly: an emulation checks
// synchronisation and indexing, and its results are compared within a tolerance.
#pragma once

// The C library declares functions of these names already, so they are macros.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __tanhf tanhf
#define __powf powf

#define CROSSFUSE_UNARY(name, expression) \
  static inline float name(float x) { return expression; }
#define CROSSFUSE_BINARY(name, expression) \
  static inline float name(float x, float y) { return expression; }
CROSSFUSE_UNARY(rsqrtf, 1.0f / sqrtf(x))
CROSSFUSE_UNARY(rsqrt, 1.0f / sqrtf(x))
CROSSFUSE_UNARY(__frcp_rn, 1.0f / x)
CROSSFUSE_UNARY(__fsqrt_rn, sqrtf(x))
CROSSFUSE_UNARY(__frsqrt_rn, 1.0f / sqrtf(x))
CROSSFUSE_UNARY(__saturatef, fminf(fmaxf(x, 0.0f), 1.0f))
CROSSFUSE_UNARY(normcdff, 0.5f * erfcf(-x * 0.70710678118654752f))
CROSSFUSE_BINARY(__fdividef, x / y)
CROSSFUSE_BINARY(__fadd_rn, x + y)
CROSSFUSE_BINARY(__fsub_rn, x - y)
CROSSFUSE_BINARY(__fmul_rn, x * y)
CROSSFUSE_BINARY(__fdiv_rn, x / y)
#undef CROSSFUSE_UNARY
#undef CROSSFUSE_BINARY
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

#define CROSSFUSE_MIN_MAX(type)                                      \
  static inline type min(type a, type b) { return b < a ? b : a; }   \
  static inline type max(type a, type b) { return a < b ? b : a; }
CROSSFUSE_MIN_MAX(int)
CROSSFUSE_MIN_MAX(unsigned)
CROSSFUSE_MIN_MAX(long)
CROSSFUSE_MIN_MAX(unsigned long)
CROSSFUSE_MIN_MAX(long long)
CROSSFUSE_MIN_MAX(unsigned long long)
#undef CROSSFUSE_MIN_MAX
// CUDA: a NaN operand loses.
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

#define CROSSFUSE_BIT_CAST(name, from, to) \
  static inline to name(from value) {      \
    to result;                             \
    __builtin_memcpy(&result, &value, sizeof(to)); \
    return result;                         \
  }
CROSSFUSE_BIT_CAST(__float_as_int, float, int)
CROSSFUSE_BIT_CAST(__int_as_float, int, float)
CROSSFUSE_BIT_CAST(__float_as_uint, float, unsigned)
CROSSFUSE_BIT_CAST(__uint_as_float, unsigned, float)
#undef CROSSFUSE_BIT_CAST

static inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
static inline int __float2int_rz(float x) { return static_cast<int>(x); }
static inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
static inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
static inline float __int2float_rn(int x) { return static_cast<float>(x); }
static inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __mul24(int x, int y) { return x * y; }
static inline int __mulhi(int x, int y) {
  return static_cast<int>(static_cast<long long>(x) * y >> 32);
}
static inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
  return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 0xFF) * (b >> 8 * i & 0xFF);
  return c;
}

// ---- atomics: fibers switch only at barriers, so the plain operation is already indivisible
#define CROSSFUSE_ATOMIC(name, expression)                                              \
  template <class T>                                                                    \
  CROSSFUSE_LEAF T name(T* pointer, std::common_type_t<T> value) {                      \
    crossfuse_emulate_atomic(pointer, sizeof(T));                                       \
    T old = crossfuse_plain_load(pointer);                                              \
    crossfuse_plain_store(pointer, static_cast<T>(expression));                         \
    return old;                                                                         \
  }
// Not instrumented: the runtime has noted the access as atomic already.
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T crossfuse_plain_load(const T* pointer) {
  return *pointer;
}
template <class T>
__attribute__((noinline, no_sanitize("thread"))) void crossfuse_plain_store(T* pointer, T value) {
  *pointer = value;
}
CROSSFUSE_ATOMIC(atomicAdd, old + value)
CROSSFUSE_ATOMIC(atomicSub, old - value)
CROSSFUSE_ATOMIC(atomicMax, old < value ? value : old)
CROSSFUSE_ATOMIC(atomicMin, value < old ? value : old)
CROSSFUSE_ATOMIC(atomicAnd, old & value)
CROSSFUSE_ATOMIC(atomicOr, old | value)
CROSSFUSE_ATOMIC(atomicExch, value)
#undef CROSSFUSE_ATOMIC
template <class T>
CROSSFUSE_LEAF T atomicCAS(T* pointer, std::common_type_t<T> expected, std::common_type_t<T> value) {
  crossfuse_emulate_atomic(pointer, sizeof(T));
  T old = crossfuse_plain_load(pointer);
  if (old == expected) crossfuse_plain_store(pointer, static_cast<T>(value));
  return old;
}
