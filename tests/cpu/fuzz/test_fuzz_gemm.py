"""Generated schedules of one product over a cluster."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cpu.fuzz.gemm import GemmPlan
from cpu.fuzz.gemm_plans import gemm_plans
from cpu.fuzz.oracle import INPUTS, journal, judge

# All examples together; the nightly profile has hundreds.
pytestmark = pytest.mark.timeout(3600)


@given(gemm_plans(), st.sampled_from(INPUTS))
def test_a_split_product_is_refused_or_right(plan: GemmPlan, inputs: str) -> None:
    journal(plan, "started")
    verdict = judge(plan.spec, plan.build, inputs)
    journal(plan, str(verdict))
    event(str(verdict))
