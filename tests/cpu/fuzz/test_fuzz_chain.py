"""Generated schedules of two products over a cluster."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cpu.fuzz.chain import ChainPlan
from cpu.fuzz.chain_plans import chain_plans
from cpu.fuzz.oracle import INPUTS, journal, judge

# All examples together; the nightly profile has hundreds.
pytestmark = pytest.mark.timeout(3600)


@given(chain_plans(), st.sampled_from(INPUTS))
def test_a_chain_is_refused_or_right(plan: ChainPlan, inputs: str) -> None:
    journal(plan, "started")
    verdict = judge(plan.spec, plan.build, inputs)
    journal(plan, str(verdict))
    event(str(verdict))
