"""Hand-written kernel images, and helpers to speak of their statements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import crossfuse
from crossfuse.emulate.cuda import EmulationReport, Finding, emulate
from crossfuse.lower.image import BufferSpec, KernelImage, Launch

DSM_HEADER = Path(crossfuse.__path__[0]) / "lower" / "device" / "dsm.cuh"


def image(
    body: str,
    buffers: Sequence[tuple[str, tuple[int, ...], str]],
    *,
    grid: int = 1,
    block: int = 64,
    cluster: int = 1,
    shared: int = 0,
    preamble: str = "",
) -> KernelImage:
    """One kernel ``k`` whose parameters are the buffers; capital ``C`` names are outputs."""
    specs = tuple(
        BufferSpec(name, shape, dtype, name.startswith("C")) for name, shape, dtype in buffers
    )
    types = {"float32": "float", "float16": "half", "int32": "int", "bfloat16": "nv_bfloat16"}
    types["uint32"] = "uint32_t"
    types |= {
        "float8_e4m3fn": "__nv_fp8_e4m3",
        "float8_e5m2": "__nv_fp8_e5m2",
        "uint8": "unsigned char",
    }
    parameters = ", ".join(f"{types[spec.dtype]}* __restrict__ {spec.name}" for spec in specs)
    dsm = DSM_HEADER.read_text() if "crossfuse_" in body else ""
    text = (
        f"{preamble}\n{dsm}\n"
        f'extern "C" __global__ void __launch_bounds__({block}) k({parameters}) {{{body}}}\n'
    )
    launch = Launch(
        "k",
        (grid, 1, 1),
        (block, 1, 1),
        (cluster, 1, 1),
        shared,
        tuple(spec.name for spec in specs),
    )
    return KernelImage("k", text, specs, (launch,))


def statement(img: KernelImage, fragment: str) -> str:
    """The only statement of the kernel that contains `fragment`, as findings quote it."""
    lines = img.cuda.splitlines()
    start = next(i for i, line in enumerate(lines) if "__global__" in line)
    found = [i for i, line in enumerate(lines) if i >= start and fragment in line]
    assert len(found) == 1, (fragment, found)
    return f"line {found[0] + 1}: {lines[found[0]].strip()}"


def only(report: EmulationReport, kind: str) -> Finding:
    """The finding of one kind, where there is just one of it."""
    found = [finding for finding in report.findings if finding.kind == kind]
    assert len(found) == 1, [str(finding) for finding in report.findings]
    return found[0]


def clean(img: KernelImage, *arrays: np.ndarray, orders: int = 2) -> dict[str, np.ndarray]:
    """Outputs of a kernel with which nothing may be wrong."""
    report = emulate(img, arrays, orders=orders)
    report.raise_if_wrong()
    assert report.ok
    return dict(report.outputs)


def ramp(*shape: int) -> np.ndarray:
    """Distinct float32 values, exact in every sum of the tests."""
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


# Each CTA reverses its own 64 elements through shared memory.
REVERSE = """
  __shared__ alignas(64) float tile[64];
  tile[threadIdx.x] = A[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  C[blockIdx.x * 64 + threadIdx.x] = tile[63 - threadIdx.x];
"""

# C[c, r, t] = sum over ranks p of (p + 1) * A[c, p, t]: a wrong rank shows in the result.
EXCHANGE = """
  extern __shared__ __align__(64) unsigned char pool[];
  ((float*)pool)[threadIdx.x] = A[blockIdx.x * 32 + threadIdx.x];
  crossfuse_cluster_sync();
  float sum = 0.0f;
  for (int rank = 0; rank < 4; ++rank) {
    sum += (rank + 1) * __uint_as_float(crossfuse_dsm_load_b32(&((float*)pool)[threadIdx.x], rank));
  }
  C[blockIdx.x * 32 + threadIdx.x] = sum;
  crossfuse_cluster_sync();
"""


def reverse() -> KernelImage:
    """C[b, i] = A[b, 63 - i], float32 (4, 64)."""
    shape = (4, 64)
    return image(REVERSE, [("A", shape, "float32"), ("C", shape, "float32")], grid=4)


def exchange() -> KernelImage:
    """Two clusters of four CTAs of 32 threads read all slabs of their cluster."""
    shape = (2, 4, 32)
    buffers = [("A", shape, "float32"), ("C", shape, "float32")]
    return image(EXCHANGE, buffers, grid=8, block=32, cluster=4, shared=128)


def exchanged(a: np.ndarray) -> np.ndarray:
    """What `exchange` computes."""
    weights = np.arange(1, 5, dtype="float32")[None, :, None]
    return np.repeat((a * weights).sum(axis=1, keepdims=True), 4, axis=1)
