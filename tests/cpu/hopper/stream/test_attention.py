"""Attention as a stream: the tile form on LLVM, and its kernel in the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.hopper.stream.attention import Attention, attention, inputs, reference
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import device
from crossfuse.lower.extract import lower

#: Fewer SMs than tiles: CTAs take several, so that one's end and the next one's begin overlap.
SMALL = replace(device("nvidia-h100"), sms=3)
CASES = {
    "full": Attention(),
    "causal": Attention(causal=True),
    "causal, an odd number of tiles": Attention(
        causal=True, rows=384, keys=384, heads=3, kv_heads=3
    ),
    "wide": Attention(depth=128, tile=(128, 128), rows=128),
    "wide, causal": Attention(depth=128, tile=(128, 128), causal=True, heads=1, kv_heads=1),
    "three warpgroups": Attention(tile=(192, 128), rows=400),
    "one warpgroup": Attention(tile=(64, 64), rows=100, keys=80),
    "grouped heads": Attention(batch=2, heads=4, kv_heads=2, rows=128),
    "odd lengths": Attention(rows=200, keys=333),
    "odd lengths, causal": Attention(rows=333, keys=345, causal=True, kv_heads=1),
    "more rows than keys, causal": Attention(rows=300, keys=128, causal=True),
    "one row": Attention(rows=1, keys=200, tile=(64, 64)),
    "window": Attention(rows=300, keys=300, causal=True, window=100),
    "window both sides": Attention(rows=200, keys=200, window=60),
    "positions": Attention(alibi=True, rows=128),
    "softcap": Attention(softcap=20.0, rows=128),
    "all at once": Attention(
        alibi=True, causal=True, softcap=20.0, window=150, rows=250, keys=300, kv_heads=1
    ),
    "float16": Attention(dtype="float16", rows=128, tile=(128, 96)),
    "depth of 80": Attention(depth=80, tile=(64, 64), rows=64),
    "a stage": Attention(stages=1, rows=128),
    "three stages": Attention(stages=3, rows=128),
}


def judge(case: Attention, given: dict[str, np.ndarray], found: Any) -> None:
    """The error is at most twice that of rounding the probabilities and the result."""
    exact = reference(case, given)
    error = np.linalg.norm(found.astype(np.float64) - exact)
    least = np.linalg.norm(reference(case, given, unfused=True) - exact)
    assert np.isfinite(found.astype(np.float64)).all()
    assert error <= 2 * least + 1e-30, (error, least)


def emulated(case: Attention, given: dict[str, np.ndarray], orders: int = 2) -> np.ndarray:
    """Run the kernel in the emulator; it must be clean."""
    image = lower(attention(case), SMALL).image
    report = emulate(image, given, orders=orders)
    report.raise_if_wrong()
    for outputs in report.later:
        assert outputs["out"].tobytes() == report.outputs["out"].tobytes()
    return report.outputs["out"]


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right(name: str) -> None:
    case = CASES[name]
    given = inputs(case)
    judge(case, given, emulated(case, given))


@pytest.mark.parametrize("name", ["causal", "odd lengths", "all at once"])
def test_tile_forms_are_right(name: str) -> None:
    case = CASES[name]
    given = inputs(case)
    report = run_sequential(attention(case), given)
    report.raise_if_wrong()
    judge(case, given, report.outputs["out"])


@pytest.mark.parametrize("size", [0.0, 40.0])
def test_equal_and_large_logits(size: float) -> None:
    case = Attention(causal=True, rows=192, keys=192, heads=1, kv_heads=1)
    given = inputs(case, 1, size)
    judge(case, given, emulated(case, given, orders=1))


@pytest.mark.slow
def test_rows_that_see_nothing_are_zero() -> None:
    case = CASES["more rows than keys, causal"]
    found = emulated(case, inputs(case), orders=1)
    assert not found[:, :, : -case.offset].astype(np.float32).any()


def test_infinite_scores_count_for_nothing() -> None:
    case = Attention(rows=64, keys=128, tile=(64, 64), heads=1, kv_heads=1)
    given = inputs(case)
    given["Q"] = np.abs(given["Q"])
    given["K"][..., 3:70, :] = -np.inf
    exact = dict(
        given, K=np.delete(given["K"], np.s_[3:70], 2), V=np.delete(given["V"], np.s_[3:70], 2)
    )
    found = emulated(case, given, orders=1)
    judge(replace(case, keys=61), exact, found)
