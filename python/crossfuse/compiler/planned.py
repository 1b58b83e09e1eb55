"""Options from the planner: kernels that follow plans, the fastest estimate first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.hardware import Device
from crossfuse.planner.noted import not_fusing, noted

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Plans of a family that are tried, in case one cannot be lowered.
_TRIED = 3


def planned_options(
    source: Source, plan: Plan | None, constant: bool, target: Device
) -> list[Option]:
    """Options to schedule a source by plan, the best one first.

    `plan` None plans the function. The plan not to fuse is then left out, since a kernel of ours is
    asked for, but its estimate is noted. `constant` says that no kernel which may still be running
    writes the weights. If rules build no kernels of such a function, or none fits, `PlanRefused` is
    raised.
    """
    from crossfuse.schedule.planned import schedule_planned

    plans = [plan] if plan is not None else _plans(source, target)
    eager = not_fusing(plans)
    return [
        Option(
            partial(schedule_planned, source.func, each, constant_weights=constant),
            each,
            {"plan": noted(each, eager)},
        )
        for each in plans
    ]


def _plans(source: Source, target: Device) -> list[Plan]:
    from crossfuse.planner.chain.build import chain_of
    from crossfuse.planner.plan import ranked
    from crossfuse.schedule.planned import rank_function

    if source.spec is None:
        return rank_function(source.func, target, keep=_TRIED, fused=True)
    # Of the extents as they are: padded operands are a source of their own.
    chain, k_major = chain_of(source.spec), source.spec.weights == "nk"
    return ranked(chain, target, k_major=k_major, keep=_TRIED, fused=True)
