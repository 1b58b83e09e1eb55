"""Masks that say of keys alone which are seen, as bits that the threads of a warp share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs
from cpu.hopper.stream.test_stream_split import SMALL, judge
from crossfuse.lower.extract import lower

pytestmark = pytest.mark.cpu

#: One token of heads that share keys, as a decoder has it.
ONE = Masked(heads=4, share=4, rows=1, keys=224, depth=64, padding=True)
CASES = {
    "one token, a part of a tile": (ONE, {"elements": 64}),
    "what is said of keys before, which the first do not have": (
        replace(ONE, shift=5),
        {"elements": 64},
    ),
    "tiles that are no whole words": (ONE, {"elements": 48}),
    "two CTAs": (ONE, {"elements": 64, "cluster": 2, "merge": "dsm"}),
    "many rows, beside a table": (
        Masked(rows=70, keys=130, depth=16, table=True, padding=True, causal=True),
        {"elements": 64},
    ),
    "columns shared, a bias": (
        Masked(heads=1, rows=64, keys=96, depth=384, padding=True, bias=True),
        {"elements": 32},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_of_keys(name: str) -> None:
    case, tiles = CASES[name]
    image = lower(scheduled(function(case), rows=64, **tiles), SMALL).image
    keys = np.arange(case.keys)
    # Of tiles some keys, all of them, or none; and none at all.
    for filled in (keys % 3 > 0, keys < 70, keys >= 0, keys < 0):
        judge(case, image, inputs(case) | {"filled": filled})
