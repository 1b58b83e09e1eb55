"""Generated schedules with calls that nobody should make."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cpu.fuzz.misuse import MisusePlan, WildPlan, misuse_plans, wild_plans
from cpu.fuzz.oracle import journal, judge

# All examples together; the nightly profile has hundreds.
pytestmark = pytest.mark.timeout(3600)


@given(st.one_of(misuse_plans(), wild_plans()))
def test_misuse_is_refused_or_right(plan: MisusePlan | WildPlan) -> None:
    journal(plan, "started")
    verdict = judge(plan.spec, plan.build)
    journal(plan, str(verdict))
    event(str(verdict))
