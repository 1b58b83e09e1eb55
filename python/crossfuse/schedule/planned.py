"""From a plan to a schedule: the rule of its family, with its tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crossfuse.blocks.chain import read_chain
from crossfuse.calls import checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.markers import unpadded_shapes
from crossfuse.planner.choice import plain_numbers
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER, FAMILIES
from crossfuse.planner.kernels.shape import shape_of, shape_of_blocks
from crossfuse.planner.plan import Plan, in_order, ranked
from crossfuse.schedule.families import schedule_family

#: What a function must have in common with the chain that was planned.
_EXTENTS = ("m", "n", "k", "l", "products")
#: Part of the memory's rate that copies to padded rows reach: 2.9 TB/s of an H200's 4.8, from what
#: chains on copies took beyond their estimate (7 shapes).
_COPIED = 0.6


@checked
def schedule_workload(workload: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule a workload as a plan says.

    Parameters
    ----------
    workload : str | WorkloadSpec | tvm.tirx.PrimFunc
        A packaged id or the text of a spec, a spec, or a canonical function.
    plan : Plan
        From `crossfuse.plan`.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        See `schedule_planned`.

    Examples
    --------
    >>> import crossfuse
    >>> sch = crossfuse.schedule("G1", crossfuse.plan("G1"))
    >>> len(sch.trace.insts) > 10
    True
    """
    from crossfuse import _tvm as ir
    from crossfuse.workload import prim_func, resolve

    if not isinstance(workload, ir.PrimFunc):
        workload = prim_func(resolve(workload) if isinstance(workload, str) else workload)
    return schedule_planned(workload, plan, constant_weights=constant_weights)


def _check_chain(func: Any, plan: Plan) -> None:
    """Refuse a plan of other extents: its tiles may fit, but were not chosen for these."""
    from crossfuse import _tvm as ir

    found, wanted = shape_of_blocks(read_chain(ir.Schedule(func))), shape_of(plan.chain)
    differ = [each for each in _EXTENTS if getattr(found, each) != getattr(wanted, each)]
    if differ:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{plan.family}'",
            found=", ".join(f"{each} = {getattr(found, each)}" for each in differ),
            limit=", ".join(f"{each} = {getattr(wanted, each)}" for each in differ)
            + ", which the plan is of",
            instead="plan this workload",
        )


def rank_function(func: Any, target: Device, *, keep: int = 1, fused: bool = False) -> list[Plan]:
    """Plan a canonical function, see `crossfuse.planner.plan.ranked`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A chain in canonical form, see `crossfuse.workload.build`.
    target : Device
        What to plan for.
    keep : int
        Plans of a family.
    fused : bool
        Whether not to fuse is no plan.

    Returns
    -------
    list[Plan]
        The fastest first, at least one of them of a kernel of ours.

    Raises
    ------
    PlanRefused
        If the function is no chain, or no kernel of ours fits.
    """
    from crossfuse import _tvm as ir
    from crossfuse.planner.extract.chain import chain_from

    chain, k_major = chain_from(func), read_chain(ir.Schedule(func)).k_major
    shapes = unpadded_shapes(func)
    # What not to fuse takes is of rows without padding.
    found = ranked(chain, target, k_major=k_major, keep=keep, fused=fused and not shapes)
    if all(each.family == EAGER for each in found):
        # Says which rule leaves no tiles of each family.
        found = ranked(chain, target, k_major=k_major, keep=keep, fused=True)
    return in_order(_padded(func, found, target), fused=fused) if shapes else found


def _padded(func: Any, plans: list[Plan], target: Device) -> list[Plan]:
    """Plans of a function of padded inputs, with the time that their copies take."""
    from crossfuse import _tvm as ir

    blocks, rates = read_chain(ir.Schedule(func)), rates_of(target)
    shapes = unpadded_shapes(func)
    moved = 0
    for each, short in zip(func.params, shapes, strict=False):
        wide = tuple(map(int, each.ty.shape))
        moved += (math.prod(wide) + math.prod(short)) * blocks.item * (wide[-1] != short[-1])
    # Bits at both edges of the memory's clock, in bytes for each microsecond.
    rate = _COPIED * target.memory_bits * target.memory_mhz / 4
    copies = rates.fitted.eager_kernel + moved / rate if moved else 0.0
    columns = shapes[1][0 if blocks.k_major else 1]
    unpadded = replace(shape_of_blocks(blocks), k=shapes[0][-1], n=columns)
    apart = eager(unpadded, rates, target.sms)
    return [
        _taking(each, apart.terms)
        if each.family == EAGER
        else _taking(each, {**each.terms, "padding": copies})
        for each in plans
    ]


def _taking(plan: Plan, terms: Mapping[str, Any]) -> Plan:
    """The plan with other terms."""
    plain = plain_numbers(terms)
    return replace(plan, microseconds=sum(plain.values()), terms=plain, runners=())


def schedule_planned(func: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule a function as a plan says.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        The canonical function that the plan is of, see `crossfuse.workload.prim_func`.
    plan : Plan
        From `crossfuse.planner.plan.plan`.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the plan is not to fuse, or the function is not what it is of.
    """
    _check_chain(func, plan)
    if plan.family in FAMILIES:
        return schedule_family(
            func, plan.family, plan.tiles, plan.device, constant_weights=constant_weights
        )
    raise refuse(
        ScheduleRefused,
        "plan",
        f"family '{plan.family}'",
        found=f"a plan of {plan.microseconds:.1f} us that leaves the chain to a library",
        limit="a plan of a kernel of ours",
        instead="call the library, or plan with only=('l2', 'dsm', 'registers', 'global')",
    )
