"""Planning and explaining at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.explain.cascade import CascadeReasons, explain_plan
from crossfuse.planner.explain.explanation import Explanation, explain
from crossfuse.planner.plan import ranked


def explain_best(
    workload: Any,
    target: str | Device | None = None,
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
    _check(top)
    plans = ranked(workload, target, only=only, rates=rates, keep=top)
    return explain(plans[0], target=target, rates=rates, best=plans[1:top])


def explain_best_cascade(
    workload: Any,
    target: str | Device | None = None,
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    top: int = 1,
) -> CascadeReasons:
    """The same of a cascade of reductions; see `explain_best`."""
    _check(top)
    plans = ranked_cascade(workload, target, only=only, rates=rates, keep=top)
    return explain_plan(plans[0], target=target, rates=rates, best=plans[1:top])


def _check(top: int) -> None:
    if top < 1:
        raise refuse(
            PlanRefused,
            "explain",
            "top",
            found=top,
            limit="1 or more plans",
            instead="ask for 1, which is the chosen plan alone",
        )


# A device of which a plan may use a part only.


def limited(target: str | Device | None, *, max_cluster: int = 0, shared_bytes: int = 0) -> Device:
    """Take a device's limits down.

    Parameters
    ----------
    target : str | Device | None
        The device.
    max_cluster : int
        CTAs of a cluster at most; 0 leaves it. Up to 8 are portable.
    shared_bytes : int
        Shared memory of a CTA at most; 0 leaves it.

    Returns
    -------
    Device
        With these limits.

    Raises
    ------
    PlanRefused
        If the device has less.
    EnvironmentRefused
        If it is unknown.
    """
    spec = device(target)
    given = {"max_cluster": max_cluster, "max_shared_bytes": shared_bytes}
    for name, value in given.items():
        most = getattr(spec, name)
        if not 0 <= value <= most:
            raise refuse(
                PlanRefused,
                "budget",
                name,
                found=value,
                limit=f"1 to {most}, what {spec.name} has, or 0 to take that",
                instead="ask for less, or leave the limit out",
            )
    return replace(
        spec,
        max_cluster=max_cluster or spec.max_cluster,
        max_shared_bytes=shared_bytes or spec.max_shared_bytes,
    )
