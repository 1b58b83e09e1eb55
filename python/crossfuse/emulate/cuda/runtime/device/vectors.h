// CUDA's built-in vector types with CUDA's alignment.
#pragma once

#define CROSSFUSE_VECTOR_234(type, name, align2, align4)                                 \
  struct name##1 {                                                                       \
    type x;                                                                              \
  };                                                                                     \
  struct alignas(align2) name##2 {                                                       \
    type x, y;                                                                           \
  };                                                                                     \
  struct name##3 {                                                                       \
    type x, y, z;                                                                        \
  };                                                                                     \
  struct alignas(align4) name##4 {                                                       \
    type x, y, z, w;                                                                     \
  };                                                                                     \
  static inline name##1 make_##name##1(type x) { return {x}; }                           \
  static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                \
  static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }     \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

CROSSFUSE_VECTOR_234(signed char, char, 2, 4)
CROSSFUSE_VECTOR_234(unsigned char, uchar, 2, 4)
CROSSFUSE_VECTOR_234(short, short, 4, 8)
CROSSFUSE_VECTOR_234(unsigned short, ushort, 4, 8)
CROSSFUSE_VECTOR_234(int, int, 8, 16)
CROSSFUSE_VECTOR_234(unsigned, uint, 8, 16)
CROSSFUSE_VECTOR_234(long long, longlong, 16, 16)
CROSSFUSE_VECTOR_234(unsigned long long, ulonglong, 16, 16)
CROSSFUSE_VECTOR_234(float, float, 8, 16)
CROSSFUSE_VECTOR_234(double, double, 16, 16)
#undef CROSSFUSE_VECTOR_234
