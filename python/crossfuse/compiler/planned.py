"""Kernels that a plan chooses: ways to schedule a function, the fastest estimate first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.hardware import Device
from crossfuse.planner.families import EAGER

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Plans of a family that are tried, in case one cannot be lowered.
_TRIED = 3


def planned_options(
    source: Source, plan: Plan | None, constant: bool, target: Device
) -> list[Option]:
    """Ways to schedule a source by plan, the best one first.

    Parameters
    ----------
    source : Source
        With a function.
    plan : Plan | None
        What is scheduled; None plans the function. Plans not to fuse are left out then, since a
        kernel of ours is asked for; what they were estimated to take is noted.
    constant : bool
        Whether no kernel that may still be running writes the weights.
    target : Device
        What to plan for.

    Returns
    -------
    list[Option]
        Each with its plan.

    Raises
    ------
    PlanRefused
        If there is no plan: the function is no chain that rules build kernels of, or none fits.
    """
    from crossfuse.schedule.planned import schedule_planned

    plans = [plan] if plan is not None else _plans(source, target)
    eager = _not_fusing(plans)
    return [
        Option(
            partial(schedule_planned, source.func, each, constant_weights=constant),
            each,
            {"plan": _noted(each, eager)},
        )
        for each in plans
        if each.family != EAGER or plan is not None
    ]


def _noted(plan: Plan, eager: float | None) -> dict[str, Any]:
    """What a plan was, as values that JSON has words for."""
    return {
        "family": plan.family,
        "tiles": dict(plan.tiles),
        "microseconds": plan.microseconds,
        "eager_microseconds": eager,
        "eager_is_faster": None if eager is None else eager < plan.microseconds,
    }


def _not_fusing(plans: list[Plan]) -> float | None:
    """Estimated microseconds of a library's kernels, where they were planned too."""
    every = [(each.family, each.microseconds) for each in plans]
    every += [(each.family, each.microseconds) for each in plans[0].runners]
    return next((time for family, time in every if family == EAGER), None)


def _plans(source: Source, target: Device) -> list[Plan]:
    from crossfuse.planner.chain.build import chain_of
    from crossfuse.planner.extract.chain import chain_from
    from crossfuse.planner.kernels.every import families
    from crossfuse.planner.kernels.shape import shape_of
    from crossfuse.planner.plan import ranked

    if source.spec is not None:
        chain, stored = chain_of(source.spec), source.spec.weights == "nk"
    else:
        chain, stored = chain_from(source.func), stored_k_major(source.func)
    found = ranked(chain, target, k_major=stored, keep=_TRIED)
    if any(each.family != EAGER for each in found):
        return found
    # Says which rule leaves no tiles of each family.
    return ranked(chain, target, k_major=stored, only=families(shape_of(chain)), keep=_TRIED)


def stored_k_major(func: Any) -> bool:
    """Whether the weights of the first product of a canonical function are stored as [n, k]."""
    from crossfuse import _tvm as ir
    from crossfuse.schedule.rules.chain import read_chain

    return read_chain(ir.Schedule(func)).k_major
