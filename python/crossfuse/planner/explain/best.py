"""Planning and explaining in one call, and devices with lowered limits."""

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
from crossfuse.planner.plan import is_cascade, ranked


def explain_best(
    workload: Any,
    target: str | Device | None = None,
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    top: int = 1,
) -> Explanation | CascadeReasons:
    """Plan a workload and explain the plan, compared with the `top` - 1 plans that come next."""
    if top < 1:
        raise refuse(
            PlanRefused,
            "explain",
            "top",
            found=top,
            limit="1 or more plans",
            instead="ask for 1, which is the chosen plan alone",
        )
    if is_cascade(workload):
        cascades = ranked_cascade(workload, target, only=only, rates=rates, keep=top)
        return explain_plan(cascades[0], target=target, rates=rates, best=cascades[1:top])
    plans = ranked(workload, target, only=only, rates=rates, keep=top)
    return explain(plans[0], target=target, rates=rates, best=plans[1:top])


def limited(target: str | Device | None, *, max_cluster: int = 0, shared_bytes: int = 0) -> Device:
    """Lower the limits of a device; 0 leaves one as it is, more than it has is refused.

    `max_cluster` is CTAs of a cluster, of which up to 8 are portable, `shared_bytes` of a CTA.
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
