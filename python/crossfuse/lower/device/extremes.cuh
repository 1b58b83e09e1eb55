// Maxima and minima that are NaN where an operand is: single instructions of sm_90.
#ifndef CROSSFUSE_EXTREMES_CUH
#define CROSSFUSE_EXTREMES_CUH

// Not volatile: equal calls are one, and a maximum with zero joins the conversion behind it.
__device__ __forceinline__ float crossfuse_maximum(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float crossfuse_minimum(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float2 crossfuse_maximum(float2 x, float2 y) {
  return make_float2(crossfuse_maximum(x.x, y.x), crossfuse_maximum(x.y, y.y));
}

__device__ __forceinline__ float2 crossfuse_minimum(float2 x, float2 y) {
  return make_float2(crossfuse_minimum(x.x, y.x), crossfuse_minimum(x.y, y.y));
}

__device__ __forceinline__ float4 crossfuse_maximum(float4 x, float4 y) {
  return make_float4(crossfuse_maximum(x.x, y.x), crossfuse_maximum(x.y, y.y),
                     crossfuse_maximum(x.z, y.z), crossfuse_maximum(x.w, y.w));
}

__device__ __forceinline__ float4 crossfuse_minimum(float4 x, float4 y) {
  return make_float4(crossfuse_minimum(x.x, y.x), crossfuse_minimum(x.y, y.y),
                     crossfuse_minimum(x.z, y.z), crossfuse_minimum(x.w, y.w));
}

#endif
