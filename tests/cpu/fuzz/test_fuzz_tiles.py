"""Generated tiles of the rules for tensor cores, on any number of rows."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cpu.fuzz.oracle import INPUTS, journal, judge
from cpu.fuzz.tile_plans import TilePlan, tile_plans

# All examples together; the nightly profile has ten times as many.
pytestmark = pytest.mark.timeout(3600)


@settings(max_examples=settings.default.max_examples // 10)
@given(tile_plans(), st.sampled_from(INPUTS))
def test_a_tiled_kernel_is_refused_or_right(plan: TilePlan, inputs: str) -> None:
    journal(plan, "started")
    verdict = judge(plan.spec, plan.build, inputs)
    journal(plan, str(verdict))
    event(str(verdict))
