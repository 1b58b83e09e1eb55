"""Launches in which a CTA does what others are late with: the same bits stored twice race not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import image, only, ramp
from cpu.emulate.test_whole_grid import HELPERS
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import KernelImage

pytestmark = pytest.mark.cpu

GRID, BLOCK = 6, 32
A = ramp(GRID, BLOCK)

# Each CTA makes its slice, waits a while for that of the next one, and makes it if none comes.
BODY = """
  unsigned mine = blockIdx.x, next = (blockIdx.x + 1) % gridDim.x;
  __shared__ alignas(64) unsigned base[1];
  if (threadIdx.x == 0) base[0] = load_flag(&seen[mine]);
  __syncthreads();
  workspace[mine * blockDim.x + threadIdx.x] = A[mine * blockDim.x + threadIdx.x] + 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(&flags[mine]);
  unsigned known = 0;
  for (int look = 0; look < 64 && known != base[0] + 1; ++look) known = load_flag(&flags[next]);
  if (__any_sync(0xffffffffu, known != base[0] + 1)) {
    workspace[next * blockDim.x + threadIdx.x] = A[next * blockDim.x + threadIdx.x] + 1.0f;
  }
  __syncthreads();
  C[mine * blockDim.x + threadIdx.x] = workspace[next * blockDim.x + (threadIdx.x ^ 1)];
  if (threadIdx.x == 0) seen[mine] = base[0] + 1;
"""


def helping(body: str = BODY, cluster: int = 2) -> KernelImage:
    """A launch whose CTAs wait for flags for a while."""
    shape = (GRID, BLOCK)
    buffers = [
        *(("A", shape, "float32"), ("C", shape, "float32"), ("workspace", shape, "float32")),
        *(("flags", (GRID,), "uint32"), ("seen", (GRID,), "uint32")),
    ]
    img = image(body, buffers, grid=GRID, block=BLOCK, cluster=cluster, preamble=HELPERS)
    workspace, *state = (replace(each, output=True) for each in img.buffers[2:])
    return replace(
        img,
        buffers=img.buffers[:2],
        launches=(replace(img.launches[0], helps=True),),
        workspaces=(workspace,),
        state=tuple(state),
    )


def expected() -> np.ndarray:
    return np.roll(A + 1, -1, axis=0).reshape(GRID, -1, 2)[:, :, ::-1].reshape(GRID, BLOCK)


@pytest.mark.parametrize("cluster", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_late_stores_the_same_bits(seed: int, cluster: int) -> None:
    report = emulate(helping(cluster=cluster), [A], seed=seed, orders=4)
    report.raise_if_wrong()
    np.testing.assert_array_equal(report.outputs["C"], expected())


TWICE = """
  for (int at = threadIdx.x; at < gridDim.x * blockDim.x; at += blockDim.x) workspace[at] = {};
  C[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
"""


def test_the_same_bits_from_everybody_are_no_race() -> None:
    assert emulate(helping(TWICE.format("A[at]")), [A], orders=4).ok


@pytest.mark.parametrize("cluster", [2, 6])
def test_other_bits_are_one(cluster: int) -> None:
    finding = only(emulate(helping(TWICE.format("blockIdx.x"), cluster), [A]), "race")
    assert finding.buffer == "workspace"


def test_where_nobody_helps_the_same_bits_are_one() -> None:
    together = helping(TWICE.format("A[at]"))
    launch = replace(together.launches[0], helps=False, cooperative=True)
    finding = only(emulate(replace(together, launches=(launch,)), [A]), "race")
    assert finding.buffer == "workspace"


def test_who_reads_follows_one_of_those_who_stored() -> None:
    """The slice is read without having waited for anybody, and without having made it."""
    idle = BODY.replace("workspace[next * blockDim.x + threadIdx.x] = A", "float unused = A")
    idle = idle.replace("look < 64", "look < 1")
    findings = emulate(helping(idle), [A], orders=4, max_findings=8).findings
    assert {each.kind for each in findings} & {"race", "uninitialised-read"}


def test_help_that_does_not_come_is_a_standstill() -> None:
    forever = BODY.replace("look < 64 && ", "")
    assert emulate(helping(forever), [A], orders=1).ok
    finding = only(emulate(helping(forever), [A], orders=2), "deadlock")
    assert finding.buffer == "flags"
