"""Plans as a built kernel records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossfuse.planner.families import EAGER

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


def noted(plan: Plan | CascadePlan, eager: float | None) -> dict[str, Any]:
    """What a plan was, as values that JSON has words for.

    Parameters
    ----------
    plan : Plan | CascadePlan
        The plan.
    eager : float | None
        Estimated microseconds of not fusing, see `not_fusing`.

    Returns
    -------
    dict[str, Any]
        Family, tiles and estimated microseconds.
    """
    return {
        "family": plan.family,
        "tiles": dict(plan.tiles),
        "microseconds": plan.microseconds,
        "eager_microseconds": eager,
        "eager_is_faster": None if eager is None else eager < plan.microseconds,
    }


def not_fusing(plans: Sequence[Plan | CascadePlan]) -> float | None:
    """Estimated microseconds of a library's kernels, where they were planned too.

    Parameters
    ----------
    plans : Sequence[Plan | CascadePlan]
        The fastest first.
    """
    every = [(each.family, each.microseconds) for each in plans]
    every += [(each.family, each.microseconds) for each in plans[0].runners]
    return next((time for family, time in every if family == EAGER), None)
