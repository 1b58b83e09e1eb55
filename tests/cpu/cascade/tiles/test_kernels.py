"""From a plain function to a warp-specialised kernel, which runs in the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference
from crossfuse.emulate.cuda import emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower

pytestmark = pytest.mark.cpu

#: Fewer SMs than tiles.
SMALL = replace(device("nvidia-h100"), sms=3)
CASES = {
    "full": Masked(rows=128, keys=128, depth=64),
    "odd lengths, causal": Masked(rows=200, keys=333, depth=64, causal=True),
    "window": Masked(rows=300, keys=300, depth=64, causal=True, window=100),
    "more rows than keys": Masked(rows=300, keys=128, depth=64, causal=True),
    "lengths": Masked(rows=64, keys=200, depth=64, lengths=True),
    "a table of what is seen": Masked(rows=64, keys=130, depth=64, table=True),
    "a bias": Masked(rows=100, keys=130, depth=64, bias=True, causal=True),
    "softcap, slopes, shared heads": Masked(
        heads=4, share=2, rows=128, keys=200, depth=64, causal=True, cap=20.0, alibi=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_attention_becomes_a_kernel(name: str) -> None:
    case = CASES[name]
    rows = 64 if case.rows <= 64 else 128
    image = lower(scheduled(function(case), rows=rows, elements=64), SMALL).image
    given = inputs(case)
    report = emulate(image, given, orders=1)
    report.raise_if_wrong()
    out = report.outputs["out"].astype(np.float64)
    exact, separate = (reference(case, given, each) for each in (np.float64, np.float32))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out - exact) <= 2 * np.linalg.norm(separate - exact)
