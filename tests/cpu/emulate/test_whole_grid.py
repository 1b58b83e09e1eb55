"""Cooperative launches: CTAs of different clusters that wait for each other's flags."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import image, only, ramp, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import KernelImage

HELPERS = """
__forceinline__ __device__ uint32_t load_flag(uint32_t* flag) {
  uint32_t seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}
__forceinline__ __device__ void wait_flag(uint32_t* flag, uint32_t value) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen != value);
}
__forceinline__ __device__ void raise_flag(uint32_t* flag) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(flag), "r"(1u) : "memory");
}
"""

# Every CTA writes its slice, and after a wait for the flags of all reads every slice reversed.
PHASES = """
  int slice = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ alignas(64) unsigned base[1];
  if (threadIdx.x == 0) base[0] = load_flag(&flags[blockIdx.x]);
  workspace[slice] = A[slice] + 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(&flags[blockIdx.x]);
  if (threadIdx.x < gridDim.x) wait_flag(&flags[threadIdx.x], base[0] + 1);
  __syncthreads();
  float sum = 0.0f;
  for (int peer = 0; peer < gridDim.x; ++peer) {
    sum += (peer + 1) * workspace[peer * blockDim.x + blockDim.x - 1 - threadIdx.x];
  }
  C[slice] = sum;
"""
GRID, BLOCK = 8, 64
A = ramp(GRID, BLOCK)


def phases(body: str = PHASES, *, cluster: int = 2, preamble: str = HELPERS) -> KernelImage:
    """A cooperative launch with one flag for each CTA and a workspace of a slice for each."""
    shape = (GRID, BLOCK)
    buffers = [
        ("A", shape, "float32"),
        ("C", shape, "float32"),
        ("workspace", shape, "float32"),
        ("flags", (GRID,), "uint32"),
    ]
    img = image(body, buffers, grid=GRID, block=BLOCK, cluster=cluster, preamble=preamble)
    launch = replace(img.launches[0], cooperative=True)
    workspace, flags = (replace(each, output=True) for each in img.buffers[2:])
    return replace(
        img,
        buffers=img.buffers[:2],
        launches=(launch,),
        workspaces=(workspace,),
        state=(flags,),
    )


def expected(a: np.ndarray) -> np.ndarray:
    weights = np.arange(1, GRID + 1, dtype="float32")[:, None]
    return np.tile(((a + 1)[:, ::-1] * weights).sum(axis=0), (GRID, 1))


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_two_phases_are_clean(seed: int, cluster: int) -> None:
    report = emulate(phases(cluster=cluster), [A], seed=seed, orders=3)
    report.raise_if_wrong()
    assert set(report.outputs) == {"C"}
    np.testing.assert_array_equal(report.outputs["C"], expected(A))


def test_state_is_kept_between_orders() -> None:
    """Without a base read from the flag, the second call does not wait: its flags are past 1."""
    stale = replace(phases(), cuda=phases().cuda.replace("base[0] + 1", "1"))
    assert emulate(stale, [A], orders=1).ok
    finding = only(emulate(stale, [A], orders=2), "deadlock")
    assert finding.buffer == "flags" and "which stays 2" in finding.detail


def test_without_a_cooperative_launch_nobody_comes() -> None:
    right = phases()
    alone = replace(right, launches=(replace(right.launches[0], cooperative=False),))
    finding = only(emulate(alone, [A]), "deadlock")
    assert finding.first == statement(alone, "wait_flag(")
    assert finding.buffer == "flags" and "polls the flag at byte" in finding.detail


def test_flag_that_nobody_raises() -> None:
    lazy = "if (blockIdx.x && !threadIdx.x) raise"
    wrong = replace(phases(), cuda=phases().cuda.replace("if (threadIdx.x == 0) raise", lazy))
    finding = only(emulate(wrong, [A]), "deadlock")
    assert finding.first == statement(wrong, "wait_flag(")
    assert (finding.buffer, finding.index) == ("flags", 0)
    assert "polls the flag at byte 0 of flags, which stays 0" in finding.detail
