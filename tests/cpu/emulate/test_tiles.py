"""Tiles that TMA loads or stores, in which threads read and write by ordinary accesses."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, LOADS, STORES
from cpu.emulate.kernels import clean
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, TensorMap

pytestmark = pytest.mark.cpu

HELPERS = BARRIERS + LOADS + STORES + "#include <cuda_fp16.h>"
# 8 rows of 128 bytes, swizzled; a thread has two groups of 16 bytes and doubles what is in them.
BODY = """
  __shared__ alignas(1024) half tile[8 * 64];
  __shared__ alignas(8) uint64_t full[1];
  int lane = threadIdx.x;
  if (lane == 0) {
    init(AT(full));
    publish();
  }
  __syncthreads();
  if (lane == 0) {
    expect(AT(full), 1024);
    load_box(AT(tile), &a_map, 0, 0, AT(full));
  }
  wait(AT(full), 0);
  for (int row = lane / 8; row < 8; row += 4) {
    for (int each = 0; each < 8; ++each) {
      half* place = tile + row * 64 + (lane % 8 ^ row) * 8 + each;
      *place = __float2half(2.0f * __half2float(*place) + lane % 8);
    }
  }
  fence_shared();
  __syncthreads();
  if (lane == 0) {
    store_box(&c_map, 0, 0, AT(tile));
    commit();
    await_reads();
  }
"""
A = np.arange(8 * 64, dtype="float32").reshape(8, 64).astype("float16")


def doubled(body: str = BODY) -> KernelImage:
    a, c = (BufferSpec(name, (8, 64), "float16", name == "C") for name in "AC")
    text = (
        f'{HELPERS}\nextern "C" __global__ void __launch_bounds__(32) k('
        "const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap c_map) "
        f"{{{body}}}\n"
    )
    maps = tuple(
        TensorMap(f"{name.lower()}_map", name, (64, 8), (128,), (64, 8), 128) for name in "AC"
    )
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("a_map", "c_map"), maps)
    return KernelImage("k", text, (a, c), (launch,))


def test_a_swizzled_tile_is_changed_where_it_lies() -> None:
    due = 2 * A.astype("float32") + np.arange(64) // 8
    np.testing.assert_array_equal(clean(doubled(), A)["C"], due.astype("float16"))


def found(body: str) -> list[str]:
    return [str(each) for each in emulate(doubled(body), (A,), orders=4).findings]


FAULTS = {
    "no fence": (
        BODY.replace("  fence_shared();\n", ""),
        "a copy by TMA reads bytes whose store no fence.proxy.async follows",
    ),
    "no barrier": (
        BODY.replace("  fence_shared();\n  __syncthreads();\n", "  fence_shared();\n"),
        "a copy by TMA reads bytes whose store no barrier orders before it",
    ),
    "a store while the copy reads": (
        BODY.replace("    await_reads();\n", "    tile[0] = __float2half(1.0f);\n"),
        "a store overwrites what a copy still reads",
    ),
    "a barrier that the copy may not see": (
        BODY.replace("    publish();\n", ""),
        "no fence.mbarrier_init and no fence.proxy.async lie between",
    ),
    "a load before the tile has come": (BODY.replace("  wait(AT(full), 0);\n", ""), ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str) -> None:
    body, reason = FAULTS[name]
    assert body != BODY
    messages = found(body)
    kinds = ("async-race", "mbarrier")
    assert any(each.startswith(kinds) and reason in each for each in messages), messages
