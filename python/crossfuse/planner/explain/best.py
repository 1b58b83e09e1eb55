"""Planning and explaining at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.explain.explanation import Explanation, explain
from crossfuse.planner.plan import ranked


def explain_best(
    workload: Any,
    target: str | Device = "nvidia-h100",
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    top: int = 1,
) -> Explanation:
    """Plan a workload and explain the plan, beside those that come next.

    Parameters
    ----------
    workload, target, only, rates
        See `crossfuse.planner.plan.plan`.
    top : int
        Plans to compare, with the chosen one.

    Raises
    ------
    PlanRefused
        If nothing fits, or fewer than one plan is asked for.
    """
    if top < 1:
        raise refuse(
            PlanRefused,
            "explain",
            "top",
            found=top,
            limit="1 or more plans",
            instead="ask for 1, which is the chosen plan alone",
        )
    plans = ranked(workload, target, only=only, rates=rates, keep=top)
    return explain(plans[0], target=target, rates=rates, best=plans[1:top])
