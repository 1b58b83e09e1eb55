"""Kernels that a plan chooses: ways to schedule a function, the fastest estimate first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.source import Source
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Plans of a family that are tried, in case one cannot be lowered.
_TRIED = 3


def planned_options(
    source: Source, plan: Plan | None, constant: bool, target: Device
) -> list[Callable[[], Any]]:
    """Ways to schedule a source by plan, the best one first.

    Parameters
    ----------
    source : Source
        With a function.
    plan : Plan | None
        What is scheduled; None plans the function. Plans not to fuse are left out then, since a
        kernel of ours is asked for.
    constant : bool
        Whether no kernel that may still be running writes the weights.
    target : Device
        What to plan for.

    Returns
    -------
    list[Callable]
        Each makes a schedule, or refuses.

    Raises
    ------
    PlanRefused
        If there is no plan: the function is no chain that rules build kernels of, or none fits.
    """
    from crossfuse.schedule.planned import schedule_planned

    plans = [plan] if plan is not None else _plans(source, target)
    return [
        partial(schedule_planned, source.func, each, constant_weights=constant) for each in plans
    ]


def _plans(source: Source, target: Device) -> list[Plan]:
    from crossfuse.planner.chain.build import chain_of
    from crossfuse.planner.extract.chain import chain_from
    from crossfuse.planner.kernels.every import families
    from crossfuse.planner.kernels.shape import shape_of
    from crossfuse.planner.plan import ranked

    if source.spec is not None:
        chain, stored = chain_of(source.spec), source.spec.weights == "nk"
    else:
        chain, stored = chain_from(source.func), _k_major(source.func)
    only = families(shape_of(chain))
    return ranked(chain, target, k_major=stored, only=only, keep=_TRIED)


def _k_major(func: Any) -> bool:
    """Whether the weights of the first product are stored as [n, k]."""
    from crossfuse import _tvm as ir
    from crossfuse.schedule.rules.chain import read_chain
    from crossfuse.schedule.rules.pipelined import is_k_major

    sch = ir.Schedule(func)
    return is_k_major(sch, read_chain(sch).first[0], 0)
