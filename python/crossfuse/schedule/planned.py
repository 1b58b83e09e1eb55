"""Schedules plans of chains and of cascades by the rules of their families, with their tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crossfuse.blocks.chain import read_layers
from crossfuse.calls import checked
from crossfuse.errors import CascadeRefused, Rule, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import CASCADE_FAMILIES, FAMILIES, families
from crossfuse.planner.kernels.shape import Shape, shape_of, shape_of_blocks
from crossfuse.planner.plan import Plan, aligned_function, plans_of_function

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site

_refused = Rule(ScheduleRefused, "plan")

#: Extents that a function must have in common with the planned chain.
_EXTENTS = ("m", "n", "k", "l", "products", "chain")


@checked
def schedule_workload(workload: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule a workload as a plan says.

    Parameters
    ----------
    workload : str | WorkloadSpec | LayersSpec | tvm.tirx.PrimFunc
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
    from crossfuse.workload import prim_func
    from crossfuse.workload.suites import resolve_chain

    if not isinstance(workload, ir.PrimFunc):
        spec = resolve_chain(workload)
        padded = aligned_function(spec)
        workload = padded if padded is not None and is_of(plan, padded) else prim_func(spec)
    return schedule_planned(workload, plan, constant_weights=constant_weights)


def is_of(plan: Plan, func: Any) -> bool:
    """Whether a plan is for the extents of a canonical function."""
    return not _differ(func, plan)[0]


def _differ(func: Any, plan: Plan) -> tuple[list[str], Shape, Shape]:
    """Extents in which function and plan differ, and the shapes of both."""
    from crossfuse import _tvm as ir

    found, wanted = (
        shape_of_blocks(read_layers(ir.Schedule(func), makes_rows=True)),
        shape_of(plan.chain),
    )
    return [e for e in _EXTENTS if getattr(found, e) != getattr(wanted, e)], found, wanted


def _check_chain(func: Any, plan: Plan) -> None:
    """Refuse a plan for other extents: its tiles may fit, but were not chosen for these."""
    differ, found, wanted = _differ(func, plan)
    if differ:
        raise _refused(
            f"family '{plan.family}'",
            found=", ".join(f"{each} = {getattr(found, each)}" for each in differ),
            limit=", ".join(f"{each} = {getattr(wanted, each)}" for each in differ)
            + ", which the plan is of",
            instead="plan this workload",
        )


def rank_function(
    func: Any, target: Device, *, keep: int = 1, fused: bool = False, pipelined: bool = False
) -> list[Plan]:
    """Plan a canonical function for a device, the fastest plan first; one at least is our kernel.

    At most `keep` plans are of a family; `fused` leaves out the plan not to fuse, and `pipelined`
    kernels that are none of the Hopper pipeline. Refused is a function that is no chain, or for
    which no kernel of ours fits. See `crossfuse.planner.plan.ranked`.
    """
    options = {"keep": keep, "pipelined": pipelined}
    found = plans_of_function(func, target, fused=fused, **options)
    if all(each.family == EAGER for each in found):
        # Says which rule leaves no tiles of each family.
        found = plans_of_function(func, target, fused=True, **options)
    return found


def schedule_planned(func: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule the canonical function that a plan is for.

    A plan not to fuse, or one for another function, is refused. No kernel that may still be running
    writes weights that are `constant_weights`.
    """
    _check_chain(func, plan)
    if plan.family in FAMILIES:
        family = FAMILIES[plan.family]
        return family.schedule(func, plan.tiles, plan.device, constant_weights=constant_weights)
    raise _refused(
        f"family '{plan.family}'",
        found=f"a plan of {plan.microseconds:.1f} us that leaves the chain to a library",
        limit="a plan of a kernel of ours",
        instead=f"call the library, plan with only={_families(plan)}, or compile without a plan, "
        "which fuses",
    )


def _families(plan: Plan) -> tuple[str, ...]:
    """Families of kernels that a plan's chain may have."""
    of = families(shape_of(plan.chain, k_major=plan.k_major))
    return tuple(each.name for each in of)


# Cascades.


def only_site(func: Any) -> Site:
    """The one cascade of a function; several are refused.

    Of rows in front of a chain it is that of the rows, of attention and a product that of
    attention.
    """
    from crossfuse.cascade.rewrite.rows_first import sites_of

    sites = sites_of(func)
    if len(sites) == 1:
        return sites[0]
    raise refuse(
        CascadeRefused,
        "compile",
        "function",
        found=f"{len(sites)} cascades over different axes",
        limit="one, which becomes one kernel",
        instead="split the function between them, or run crossfuse.relax.FuseCascades on its model",
    )


def schedule_cascade(
    site: Site,
    derivation: Derivation,
    family: str,
    tiles: Mapping[str, Any],
    *,
    constant_weights: bool = False,
) -> Any:
    """Write a cascade as a stream, and schedule it by one of `CASCADE_FAMILIES`.

    Tiles are fields of the family's `kind`, with the class's defaults; `constant_weights` is of
    families ``rows`` and ``rows_chain``: no kernel that may still be running writes the weights.
    The trace replays on the stream, not on the function. Refused are other families and fields, and
    a cascade that has no such form.
    """
    if family not in CASCADE_FAMILIES:
        raise _refused(
            f"family '{family}'",
            found="a plan that leaves the cascade to separate kernels"
            if family == EAGER
            else "a family of chains of products",
            limit=", ".join(CASCADE_FAMILIES),
            instead=f"plan with only={tuple(CASCADE_FAMILIES)}",
        )
    of = CASCADE_FAMILIES[family]
    return of.schedule(site, derivation, of.read(tiles), constant=constant_weights)


def schedule_cascade_of(
    func: Any, family: str, tiles: Mapping[str, Any], *, constant_weights: bool = False
) -> Any:
    """Schedule the only cascade of a function; see `schedule_cascade`."""
    from crossfuse.cascade.algebra import derive

    site = only_site(func)
    return schedule_cascade(
        site, derive(site.cascade), family, tiles, constant_weights=constant_weights
    )
