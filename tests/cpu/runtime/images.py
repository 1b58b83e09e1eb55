"""Hand-written kernel images for the tests of the runtime."""

from __future__ import annotations

from pathlib import Path

import crossfuse
from crossfuse.lower.image import BufferSpec, KernelImage, Launch

DSM_HEADER = Path(crossfuse.__path__[0]) / "lower" / "device" / "dsm.cuh"
THREADS = 128

_VECTOR_ADD = """
extern "C" __global__ void add_kernel(const float* a, const float* b, float* c) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  c[i] = a[i] + b[i];
}
"""

# Each CTA adds the tiles of all CTAs of its cluster, read over DSM in the order of the ranks.
_CLUSTER_SUM = """
extern "C" __global__ void sum_kernel(const float* x, float* y) {
  extern __shared__ float tile[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  crossfuse_cluster_sync();
  float sum = 0;
  for (int rank = 0; rank < CLUSTER; ++rank) {
    sum += __uint_as_float(crossfuse_dsm_load_b32(&tile[threadIdx.x], rank));
  }
  crossfuse_cluster_sync();
  y[i] = sum;
}
"""

_BFLOAT16_TWICE = """
#include <cuda_bf16.h>
extern "C" __global__ void twice_kernel(const __nv_bfloat16* x, __nv_bfloat16* y) {
  y[threadIdx.x] = __hadd(x[threadIdx.x], x[threadIdx.x]);
}
"""


def vector_add(rows: int = 4) -> KernelImage:
    """C = A + B over (rows, 128) float32, a CTA for each row."""
    buffers = tuple(BufferSpec(name, (rows, THREADS), "float32", name == "C") for name in "ABC")
    launch = Launch("add_kernel", (rows, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, ("A", "B", "C"))
    return KernelImage("vector_add", _VECTOR_ADD, buffers, (launch,))


def cluster_sum(size: int, clusters: int = 2, shared_bytes: int = 4 * THREADS) -> KernelImage:
    """Y[c, r] = sum of X[c, :] over the CTAs of cluster c, each (128,) float32."""
    cuda = f"#define CLUSTER {size}\n{DSM_HEADER.read_text()}{_CLUSTER_SUM}"
    shape = (clusters, size, THREADS)
    buffers = tuple(BufferSpec(name, shape, "float32", name == "Y") for name in "XY")
    launch = Launch(
        "sum_kernel",
        (clusters * size, 1, 1),
        (THREADS, 1, 1),
        (size, 1, 1),
        shared_bytes,
        ("X", "Y"),
    )
    return KernelImage(f"cluster_sum_{size}", cuda, buffers, (launch,))


def bfloat16_twice() -> KernelImage:
    """Y = X + X over (128,) bfloat16; the output comes first among the buffers."""
    buffers = tuple(BufferSpec(name, (THREADS,), "bfloat16", name == "Y") for name in "YX")
    launch = Launch("twice_kernel", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, ("X", "Y"))
    return KernelImage("bfloat16_twice", _BFLOAT16_TWICE, buffers, (launch,))
