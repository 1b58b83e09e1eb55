"""Cooperative launches: CTAs of different clusters that wait for each other's flags."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, exchange, exchanged, image, only, ramp, statement
from crossfuse.emulate.cuda import emulate, remove_cluster_barrier
from crossfuse.errors import CheckFailed
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


def planted(old: str, new: str) -> KernelImage:
    """The two phases with one statement changed."""
    right = phases()
    assert right.cuda.count(old) == 1
    return replace(right, cuda=right.cuda.replace(old, new))


RED = "red.release.gpu.global.add.u32"
POLL = """  do {
    asm volatile("ld.acquire"""
WRITE, READ = "workspace[slice] =", "sum +="
FAULTS = {
    "a plain store of the flag": (
        lambda: planted("raise_flag(&flags[blockIdx.x])", "flags[blockIdx.x] = base[0] + 1"),
        ("flags[blockIdx.x] = base", "wait_flag("),
        "between",
    ),
    "a relaxed store of the flag": (
        lambda: planted(RED, RED.replace("release", "relaxed")),
        (WRITE, READ),
        "no release and acquire of a flag lie between",
    ),
    "a relaxed poll": (
        lambda: planted(POLL, POLL.replace("acquire", "relaxed")),
        (WRITE, READ),
        "no release and acquire of a flag lie between",
    ),
    "a wait for too few flags": (
        lambda: planted("threadIdx.x < gridDim.x", "threadIdx.x < gridDim.x - 1"),
        (WRITE, READ),
        "no release and acquire of a flag lie between",
    ),
    "a release before all threads have written": (
        lambda: planted(
            "  __syncthreads();\n  if (threadIdx.x == 0) raise", "  if (threadIdx.x == 0) raise"
        ),
        (WRITE, READ),
        "between",
    ),
    "reads of threads that did not wait for those that poll": (
        lambda: planted("  __syncthreads();\n  float sum", "  float sum"),
        (WRITE, READ),
        "between",
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_fault_between_clusters_is_caught(name: str, seed: int) -> None:
    make, pair, detail = FAULTS[name]
    wrong = make()
    report = emulate(wrong, [A], seed=seed, orders=1)
    races = [each for each in report.findings if each.kind == "race"]
    wanted = {statement(wrong, fragment) for fragment in pair}
    found = [each for each in races if {each.first, each.second} == wanted]
    assert found and detail in found[0].detail, [str(each) for each in report.findings]


STORE = """asm volatile("st.release.gpu.global.u32 [%0], %1;"
    :: "l"(&flags[blockIdx.x]), "r"(base[0] + 1) : "memory")"""
TICKET = """asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
    : "=r"(base[1]) : "l"(&flags[blockIdx.x]), "r"(1u) : "memory")"""


@pytest.mark.parametrize("statement", [STORE, TICKET])
def test_other_ways_to_raise_a_flag(statement: str) -> None:
    right = planted("raise_flag(&flags[blockIdx.x])", statement)
    right = replace(right, cuda=right.cuda.replace("base[1];", "base[2];", 1))
    np.testing.assert_array_equal(clean(right, A)["C"], expected(A))
    relaxed = re.sub("release|acq_rel", "relaxed", right.cuda)
    assert only(emulate(replace(right, cuda=relaxed), [A]), "race").buffer == "workspace"


FENCED = {
    "raise_flag(&flags[blockIdx.x])": "{ __threadfence(); atomicAdd(&flags[blockIdx.x], 1u); }",
    POLL: POLL.replace("acquire", "relaxed"),
    "base[0] + 1);\n": 'base[0] + 1);\n  asm volatile("fence.acq_rel.gpu;" ::: "memory");\n',
}


def test_fences_make_relaxed_accesses_order() -> None:
    text = phases().cuda
    for old, new in FENCED.items():
        text = text.replace(old, new)
    right = replace(phases(), cuda=text)
    np.testing.assert_array_equal(clean(right, A)["C"], expected(A))
    for fence in ("__threadfence();", 'asm volatile("fence.acq_rel.gpu;" ::: "memory");'):
        assert text.count(fence) == 1
        wrong = replace(right, cuda=text.replace(fence, ""))
        assert only(emulate(wrong, [A]), "race").buffer == "workspace"


def test_clusters_at_once_address_their_own_shared_memory() -> None:
    a = ramp(2, 4, 32)
    for right in (exchange(), remove_cluster_barrier(exchange(), 0)):
        together = replace(right, launches=(replace(right.launches[0], cooperative=True),))
        report = emulate(together, [a])
        alone = {finding.kind for finding in emulate(right, [a]).findings}
        assert {finding.kind for finding in report.findings} == alone
        if not alone:
            np.testing.assert_array_equal(report.outputs["C"], exchanged(a))


def test_more_ctas_at_once_than_fit_are_refused() -> None:
    right = phases()
    wide = replace(right.launches[0], grid=(8192, 1, 1))
    with pytest.raises(CheckFailed, match="4096 CTAs"):
        emulate(replace(right, launches=(wide,)), [A])


def test_an_acquire_is_handed_on() -> None:
    """CTA 2 has it from 1 that 0 has written; every link of that chain is needed."""
    body = """
  if (blockIdx.x == 0) { C[0] = A[0]; raise_flag(&flags[0]); }  // writes
  if (blockIdx.x == 1) { wait_flag(&flags[0], flags[3] + 1); raise_flag(&flags[1]); }
  if (blockIdx.x == 2) { wait_flag(&flags[1], flags[3] + 1); C[1] = C[0]; }  // reads
  if (blockIdx.x == 3) C[2] = A[0];
"""
    img = image(
        body,
        [("A", (1,), "float32"), ("C", (3,), "float32"), ("flags", (4,), "uint32")],
        grid=4,
        block=1,
        preamble=HELPERS,
    )
    launch = replace(img.launches[0], cooperative=True)
    state = replace(img.buffers[2], output=True)
    right = replace(img, buffers=img.buffers[:2], launches=(launch,), state=(state,))
    assert emulate(right, [ramp(1)], orders=1).ok
    short = right.cuda.replace("wait_flag(&flags[0], flags[3] + 1); ", "")
    race = only(emulate(replace(right, cuda=short), [ramp(1)], orders=1), "race")
    assert race.buffer == "C" and "no release and acquire of a flag" in race.detail
