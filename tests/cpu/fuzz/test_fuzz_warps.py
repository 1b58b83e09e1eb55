"""Generated attention of few rows by warps, on rows and masks of all kinds: refused or right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs
from cpu.hopper.stream.test_stream_split import SMALL, judge
from crossfuse.errors import RefusedError
from crossfuse.lower.extract import lower

pytestmark = pytest.mark.timeout(3600)

#: What becomes of queries, keys or values: offsets, equal elements, large and least numbers.
CHANGES: dict[str, tuple[str, float, float]] = {
    "plain": ("q", 1.0, 0.0),
    "far values": ("v", 1e-2, 1e4),
    "equal keys": ("k", 0.0, 0.7),
    "equal values": ("v", 0.0, 3.3),
    "no scores": ("q", 0.0, 0.0),
    "large scores": ("q", 50.0, 0.0),
}


@st.composite
def cases(draw: st.DrawFn) -> Masked:
    rows = draw(st.sampled_from([1, 1, 1, 2, 5, 9, 16]))
    share = draw(st.integers(1, 16) if rows == 1 else st.integers(1, 2))
    padding = draw(st.booleans())
    return Masked(
        heads=share * draw(st.integers(1, 3)),
        share=share,
        rows=rows,
        keys=draw(st.sampled_from([16, 31, 65, 130, 257, 777])),
        depth=draw(st.sampled_from([64, 128, 192])),
        causal=rows > 1 and draw(st.booleans()),
        window=draw(st.sampled_from([0, 50])) if rows > 1 else 0,
        cap=draw(st.sampled_from([0.0, 20.0])),
        alibi=draw(st.booleans()),
        lengths=draw(st.booleans()),
        table=draw(st.booleans()),
        padding=padding,
        shift=draw(st.sampled_from([0, 5])) if padding else 0,
        bias=draw(st.booleans()),
        hidden=draw(st.sampled_from([-np.inf, -65536.0, float(np.finfo(np.float32).min)])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
    )


def changed(case: Masked, change: str, seen: int) -> dict[str, Any]:
    made = inputs(case)
    name, scale, offset = CHANGES[change]
    made[name] = (made[name].astype(np.float32) * scale + offset).astype(made[name].dtype)
    if case.padding:
        # Those before a number of keys, or, with a negative one, those behind it.
        key = np.arange(case.keys)
        made["filled"][...] = key < seen if seen >= 0 else key >= -seen
    return made


@settings(max_examples=settings.default.max_examples // 10)
@given(
    cases(),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 1, 2, 3, 4, 8, 16]),
    st.sampled_from(list(CHANGES)),
    st.integers(-800, 800),
)
def test_few_rows_are_refused_or_right(
    case: Masked, elements: int, cluster: int, change: str, seen: int
) -> None:
    rows = 8 if max(case.share, case.rows) <= 8 else 16
    try:
        schedule = scheduled(function(case), rows=rows, elements=elements, cluster=cluster)
        image = lower(schedule, SMALL).image
    except RefusedError as refusal:
        event(refusal.refusal.rule)
        return
    event("built")
    judge(case, image, changed(case, change, seen))
