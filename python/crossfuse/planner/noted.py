"""Plans as a built kernel records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossfuse.planner.families import EAGER

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


def noted(plan: Plan | CascadePlan, eager: float | None) -> dict[str, Any]:
    """Summarise a plan for JSON; `eager` is the time of `not_fusing`."""
    return {
        "family": plan.family,
        "tiles": dict(plan.tiles),
        "microseconds": plan.microseconds,
        "eager_microseconds": eager,
        "eager_is_faster": None if eager is None else eager < plan.microseconds,
    }


def not_fusing(plans: Sequence[Plan | CascadePlan]) -> float | None:
    """Estimated microseconds of a library's kernels, None where they were not planned.

    Plans come with the fastest first, which has the others as runners.
    """
    every = [(each.family, each.microseconds) for each in plans]
    every += [(each.family, each.microseconds) for each in plans[0].runners]
    return next((time for family, time in every if family == EAGER), None)
