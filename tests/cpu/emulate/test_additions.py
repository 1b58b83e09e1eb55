"""Boxes that CTAs of different clusters add by TMA to one row in global memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, ramp
from cpu.emulate.test_grid_copies import HELPERS
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, TensorMap

CTAS, WIDTH = 4, 32
ADDING = (
    HELPERS
    + """
__forceinline__ __device__ void fill(unsigned address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(low), "f"(high) : "memory");
}
__forceinline__ __device__ void add_box(const void* map, int x, int y, unsigned from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
               "[%0, {%1, %2}], [%3];" :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}
__forceinline__ __device__ void clear(float* place) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(place), "f"(0.0f), "f"(0.0f), "f"(0.0f), "f"(0.0f) : "memory");
}
"""
)
# CTA 0 reads the sums of all and makes them zero again.
BODY = """
  __shared__ alignas(128) float tile[32];
  __shared__ alignas(16) unsigned base[1];
  int lane = threadIdx.x;
  if (blockIdx.x == 0 && lane == 0) base[0] = before[0];
  if (lane < 16) {
    const float* from = A + blockIdx.x * 32 + lane * 2;
    fill(AT(&tile[lane * 2]), from[0], from[1]);
  }
  fence_shared();
  __syncthreads();
  if (lane == 0) {
    add_box(&sums_map, 0, 0, AT(tile));
    commit();
    await_stores();
    raise_flag(flags);
  }
  if (blockIdx.x == 0) {
    if (lane == 0) {
      wait_flag(flags, base[0] + CTAS);
      before[0] = base[0] + CTAS;
    }
    __syncthreads();
    if (lane < 8) {
      for (int i = 0; i < 4; ++i) C[lane * 4 + i] = sums[lane * 4 + i];
      clear(sums + lane * 4);
    }
  }
"""
A = ramp(CTAS, WIDTH)


def additions(body: str = BODY, *, kept: bool = True, dtype: str = "float32") -> KernelImage:
    """Four CTAs; sums are kept from launch to launch, or nobody has made them zero."""
    a = BufferSpec("A", (CTAS, WIDTH), "float32", False)
    c = BufferSpec("C", (WIDTH,), "float32", True)
    sums = BufferSpec("sums", (1, WIDTH), dtype, True)
    flags, before = (BufferSpec(name, (1,), "uint32", True) for name in ("flags", "before"))
    parameters = (
        "float* A, float* C, float* sums, uint32_t* flags, uint32_t* before, "
        "const __grid_constant__ CUtensorMap sums_map"
    )
    text = (
        f"{ADDING}\n#define CTAS {CTAS}\n"
        f'extern "C" __global__ void __launch_bounds__(32) k({parameters}) {{{body}}}\n'
    )
    map_ = TensorMap("sums_map", "sums", (WIDTH, 1), (4 * WIDTH,), (WIDTH, 1), 0)
    names = ("A", "C", "sums", "flags", "before", "sums_map")
    grid, one = (CTAS, 1, 1), (1, 1, 1)
    launch = Launch("k", grid, (32, 1, 1), one, 0, names, (map_,), cooperative=True)
    state = (flags, before, sums) if kept else (flags, before)
    return KernelImage("k", text, (a, c), (launch,), () if kept else (sums,), state, True)


def changed(statement: str, by: str = "") -> KernelImage:
    """The right kernel without one statement, or with another in its place."""
    assert BODY.count(statement) == 1
    return additions(BODY.replace(statement, by))


@pytest.mark.parametrize("seed", range(4))
def test_each_launch_finds_zeros(seed: int) -> None:
    report = emulate(additions(), [A], seed=seed, orders=3)
    report.raise_if_wrong()
    for outputs in (report.outputs, *report.later):
        np.testing.assert_array_equal(outputs["C"], A.sum(axis=0))


def test_additions_come_in_any_order() -> None:
    terms = np.repeat(np.float32([2**24, 1, 1, -(2**24)])[:, None], WIDTH, axis=1)
    report = emulate(additions(), [terms], orders=8)
    report.raise_if_wrong()
    assert len({each["C"].tobytes() for each in (report.outputs, *report.later)}) > 1
    ordered = replace(additions(), unordered=False)
    kinds = {each.kind for each in emulate(ordered, [terms], orders=8).findings}
    assert kinds == {"order-dependent"}


def test_numbers_below_normal_ones_are_flushed() -> None:
    """Terms and sums: 2^-126 is normal, three quarters of it are not."""
    terms = np.zeros((CTAS, WIDTH), np.float32)
    terms[:, 0] = 2.0**-127
    terms[0, 1] = 2.0**-126
    terms[:2, 2] = [1.5 * 2.0**-126, -(2.0**-126)]
    found = clean(additions(), terms)["C"]
    np.testing.assert_array_equal(found, [0, 2.0**-126, *np.zeros(WIDTH - 2)])


def test_nothing_is_added_beyond_the_tensor() -> None:
    """A box that begins a row above the tensor, and one eight columns before its end."""
    above = changed("add_box(&sums_map, 0, 0, AT(tile));", "add_box(&sums_map, 0, -1, AT(tile));")
    np.testing.assert_array_equal(clean(above, A)["C"], np.zeros(WIDTH))
    aside = changed("add_box(&sums_map, 0, 0, AT(tile));", "add_box(&sums_map, 24, 0, AT(tile));")
    due = np.concatenate([np.zeros(24), A.sum(axis=0)[:8]])
    np.testing.assert_array_equal(clean(aside, A)["C"], due)


ZERO = "if (blockIdx.x == 0 && lane < 8) clear(sums + lane * 4);"
Fault = tuple[Callable[[], KernelImage], str, str]
FAULTS: dict[str, Fault] = {
    "only the reads of an addition waited for": (
        lambda: changed("await_stores();", "await_reads();"),
        "race",
        "the copy is not waited for",
    ),
    "one CTA does not wait, which others come after": (
        lambda: changed("await_stores();", "if (blockIdx.x != 2) await_stores();"),
        "race",
        "the copy is not waited for",
    ),
    "one CTA does not raise the flag, and another counts twice": (
        lambda: changed(
            "raise_flag(flags);",
            "if (blockIdx.x != 2) raise_flag(flags); if (blockIdx.x == 1) raise_flag(flags);",
        ),
        "race",
        "no release and acquire of a flag",
    ),
    "a box that is filled again": (
        lambda: changed("    commit();\n", "    commit();\n    fill(AT(tile), 0.0f, 0.0f);\n"),
        "async-race",
        "a store overwrites what a copy still reads",
    ),
    "sums that nobody has made zero": (
        lambda: additions(kept=False),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "zeros that do not come before the additions of others": (
        lambda: changed("  fence_shared();", f"  {ZERO}\n  fence_async();"),
        "race",
        "no release and acquire of a flag",
    ),
    "no proxy fence behind zeros of the same launch": (
        lambda: changed("  fence_shared();", f"  fence_shared();\n  {ZERO}"),
        "async-race",
        "no fence.proxy.async lies between that store and this copy",
    ),
    "numbers of 16 bits": (
        lambda: additions(dtype="float16"),
        "tensor-map",
        "an addition takes a map of float32",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_fault_is_caught(name: str, seed: int) -> None:
    make, kind, detail = FAULTS[name]
    report = emulate(make(), [A], seed=seed, orders=2)
    named = [str(each) for each in report.findings if each.kind == kind]
    assert any(detail in each for each in named), [str(each) for each in report.findings]


def test_missing_zeros_are_missed_by_the_second_launch() -> None:
    report = emulate(changed("      clear(sums + lane * 4);\n"), [A], orders=2)
    report.raise_if_wrong()
    np.testing.assert_array_equal(report.outputs["C"], A.sum(axis=0))
    np.testing.assert_array_equal(report.later[0]["C"], 2 * A.sum(axis=0))
