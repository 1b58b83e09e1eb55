"""TIRx's `gemm_async` as wgmma, in kernels that are written by hand."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.hopper.hand_written import Tiles, image
from cpu.lower.support import kernels_in
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.runtime import compile_cubin

CASES = {
    "shared memory": Tiles(),
    "two warpgroups": Tiles(warpgroups=2),
    "two warpgroups, registers": Tiles(n=128, warpgroups=2, registers=True),
    "float16": Tiles(n=72, dtype="float16"),
    "narrow": Tiles(n=8),
    "two blocks of columns": Tiles(n=32, k=256, depth=128),
    "without a swizzle": Tiles(swizzled=False),
    "[k, n]": Tiles(n=128, transposed=True),
    "[k, n], a short step": Tiles(depth=32, registers=True, transposed=True, swizzled=False),
    "registers": Tiles(n=96, registers=True),
    "e4m3": Tiles(n=64, k=256, depth=128, dtype="float8_e4m3fn"),
    "e5m2 by e4m3": Tiles(k=256, depth=128, dtype="float8_e5m2", right="float8_e4m3fn"),
    "e4m3, registers": Tiles(k=256, depth=128, dtype="float8_e4m3fn", registers=True),
}


def inputs_of(tiles: Tiles) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    b_shape = (tiles.k, tiles.n) if tiles.transposed else (tiles.n, tiles.k)
    drawn = {"A": (64 * tiles.warpgroups, tiles.k), "B": b_shape}
    types = {"A": tiles.dtype, "B": tiles.right_type}
    return {
        name: rng.standard_normal(shape).astype(
            getattr(ml_dtypes, types[name], None) or types[name]
        )
        for name, shape in drawn.items()
    }


def right_answer(tiles: Tiles, inputs: dict[str, Any]) -> Any:
    a, b = (inputs[name].astype(np.float64) for name in "AB")
    return a @ (b if tiles.transposed else b.T)


@pytest.mark.parametrize("name", CASES)
def test_product_is_right(name: str) -> None:
    tiles = CASES[name]
    inputs = inputs_of(tiles)
    report = emulate(image(tiles), inputs, orders=2)
    report.raise_if_wrong()
    np.testing.assert_allclose(report.outputs["C"], right_answer(tiles, inputs), atol=1e-3)


def test_text_of_a_call() -> None:
    """A fence of the registers, then a wgmma for every 32 bytes of the reduction."""
    text = kernels_in(image(Tiles(n=32, k=256, depth=128)).cuda)
    steps = re.findall(r"hold_16|wgmma_fence_fence|m64n32k16|commit_group_c|wait_group_s", text)
    products = ["m64n32k16"] * 8
    call = ["hold_16", "wgmma_fence_fence", *products]
    assert steps == [*call, "commit_group_c", "wait_group_s", "hold_16"]
    lines = [line for line in text.splitlines() if "m64n32k16" in line]
    left = r"A_s_tile_ptr\[0\] \+ .*? \* 512\)(?: \+ (\d+))?"
    right = r"B_s_tile_ptr\[0\](?: \+ \(uint64_t\)(\d+))?"
    found = [[int(re.search(side, each)[1] or 0) for side in (left, right)] for each in lines]
    # Units of 16 bytes. Blocks of 64 columns have 64 rows of 128 bytes, and 32 of the right tile.
    assert found == [
        [2 * (part % 4) + part // 4 * rows * 8 for rows in (64, 32)] for part in range(8)
    ]


FROM_REGISTERS = r"tvm_builtin_ptx_wgmma_\w+_rs_mma\w+"
FENCE = r"tvm_builtin_ptx_wgmma_fence\w+"
WAIT = r"tvm_builtin_ptx_wgmma_wait_group\w+"


@pytest.mark.parametrize("case", ["shared memory", "registers"])
def test_a_missing_wait_is_caught(case: str) -> None:
    tiles = CASES[case]
    inputs = inputs_of(tiles)
    report = emulate(drop_call(image(tiles), WAIT, 0), inputs, orders=3)
    wrong = not report.ok or not np.allclose(
        report.outputs["C"], right_answer(tiles, inputs), atol=1e-3
    )
    assert wrong


def test_a_missing_fence_is_caught() -> None:
    tiles = CASES["registers"]
    report = emulate(drop_call(image(tiles), FENCE, 0), inputs_of(tiles), orders=2)
    assert "register-race" in {each.kind for each in report.findings}


@pytest.mark.parametrize(
    ("call", "reasons"),
    [
        (r"tvm_builtin_ptx_fence_proxy\w+", ["wgmma reads bytes whose store no fence.proxy.async"]),
        # Whichever of the two comes first.
        (
            r"tvm_builtin_cuda_cta_sync",
            [
                "wgmma reads bytes whose store no barrier orders before it",
                "a store overwrites a tile that is still being multiplied",
            ],
        ),
    ],
    ids=["fence", "barrier"],
)
def test_ordinary_stores_of_tiles_are_ordered_with_wgmma(call: str, reasons: list[str]) -> None:
    tiles = CASES["shared memory"]
    report = emulate(drop_call(image(tiles), call, 0), inputs_of(tiles), orders=3)
    found = " ".join(map(str, report.findings))
    assert any(each in found for each in reasons), report.findings


def test_a_wrong_register_is_caught() -> None:
    tiles = CASES["registers"]
    inputs = inputs_of(tiles)
    wrong = change_argument(image(tiles), FROM_REGISTERS, tiles.n // 2, "((uint*)A_r_ptr)[7]")
    with pytest.raises(AssertionError):
        report = emulate(wrong, inputs, orders=1)
        np.testing.assert_allclose(report.outputs["C"], right_answer(tiles, inputs), atol=1e-3)


@pytest.mark.parametrize("name", ["[k, n]", "registers", "e4m3", "without a swizzle"])
def test_nvcc_compiles_without_spills(name: str) -> None:
    (usage,) = compile_cubin(image(CASES[name]).cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
    assert usage.advisories == ()
