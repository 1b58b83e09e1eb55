// Functions of numbers that are one instruction of sm_90.
#ifndef CROSSFUSE_MATH_CUH
#define CROSSFUSE_MATH_CUH

// Not volatile: equal calls are one. Results below 2^-126 are 0, as are arguments below.
__device__ __forceinline__ float crossfuse_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
