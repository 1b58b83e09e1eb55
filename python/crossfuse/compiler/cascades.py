"""Options to schedule a cascade of reductions, the best one first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.noted import not_fusing, noted
from crossfuse.schedule.cascades import only_site, schedule_cascade

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


def is_cascade(source: Source) -> bool:
    """Whether a source is compiled as a cascade: its spec says so, or its function holds no chain.

    A function that is neither cascade nor chain raises `ScheduleRefused`, saying what each lacks.
    """
    if source.cascade is not None:
        return True
    if source.func is None or source.spec is not None or source.outlined is not None:
        return False
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_layers

    try:
        read_layers(ir.Schedule(source.func))
    except RefusedError as error:
        _check_cascade(source, error)
        return True
    return False


def _check_cascade(source: Source, no_chain: RefusedError) -> None:
    """Refuse a function that holds no cascade either, given why it is no chain."""
    from crossfuse.cascade.rewrite.sites import sites_of

    try:
        missing = "" if sites_of(source.func) else "no reduction"
    except RefusedError as error:
        missing = f"{error.refusal.where}: {error.refusal.found}"
    if not missing:
        return
    chain = f"{no_chain.refusal.where}: {no_chain.refusal.found}"
    raise refuse(
        ScheduleRefused,
        "compile",
        source.summary,
        found=f"neither a cascade of reductions ({missing}) nor a chain of products ({chain})",
        limit="reductions over one axis, or one or two products with elementwise blocks",
        instead="split the function into such parts, or write the schedule with the primitives",
    )


def cascade_options(
    source: Source,
    target: Device,
    plan: CascadePlan | None = None,
    constant: bool = False,
    placement: str = "auto",
) -> list[Option]:
    """Options to schedule a cascade, the fastest estimate first; at least one.

    `plan` None plans the source. The plan not to fuse is then left out, since a kernel of ours is
    asked for, but its estimate is noted. `constant` says that no kernel which may still be running
    writes the weights of a product. `placement` is where states live, see
    `crossfuse.planner.cascade.plan.placed_cascade`; ``"auto"`` leaves it to the planner. No
    cascade, several, or one that cannot stream raises `CascadeRefused`; tiles that do not fit,
    `PlanRefused`.
    """
    try:
        return _one_cascade(source, target, plan, constant, placement)
    except (CascadeRefused, PlanRefused):
        # What is no stream as a whole may be rows and a product.
        free = plan is None and placement == "auto"
        first = rows_first_options(source.func, target, constant) if free else []
        if first:
            return first
        raise


def _one_cascade(
    source: Source, target: Device, plan: CascadePlan | None, constant: bool, placement: str
) -> list[Option]:
    """Options to schedule the whole function as one cascade."""
    from crossfuse import _tvm as ir
    from crossfuse.cascade.algebra import derive
    from crossfuse.planner.cascade.plan import placed_cascade, ranked_cascade, tried
    from crossfuse.planner.cascade.shape import cascade_shape

    # Importers count in 64 bits, and kernels in 32.
    site = only_site(ir.narrow(source.func))
    derivation = derive(site.cascade)
    every = [plan] if plan is not None else []
    if plan is None:
        shape = cascade_shape(site, derivation, source.summary)
        every = (
            ranked_cascade(shape, target, fused=True)
            if placement == "auto"
            else placed_cascade(shape, placement, target)
        )
    eager = not_fusing(every)
    plans = every if plan is not None else tried(every)
    return [
        Option(
            partial(
                schedule_cascade,
                site,
                derivation,
                each.family,
                each.tiles,
                constant_weights=constant,
            ),
            each,
            {each.family: dict(each.tiles), "plan": noted(each, eager)},
        )
        for each in plans
    ]


# Options to schedule a product whose left operand a cascade makes, as one kernel.
#
# For functions that are one cascade as a whole the planner weighs these against others (family
# ``rows``, see `crossfuse.planner.cascade.rows_space`); these options are for all other functions.

#: Plans of the product that are tried: the first may have too many sums beside the rows.
_TRIED = 6


def rows_first_options(func: Any, target: Device, constant: bool = False) -> list[Option]:
    """Options to make rows, and their product, in two phases of one kernel; none for other forms.

    The product's tiles are those that it would have alone, the fastest first. `constant` says that
    no kernel which may still be running writes the weights.
    """
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.cascade.rewrite.rows_first import rows_first
    from crossfuse.cascade.rewrite.streaming import streaming
    from crossfuse.planner.cascade.rows_product import chunk_of

    parts = rows_first(func)
    if parts is None:
        return []
    try:
        sites = detect(parts.rows)
        plans = _plans(parts.product, target)
        if len(sites) != 1:
            return []
        derivation = derive(sites[0].cascade)
        streaming(sites[0], derivation)
    except (CascadeRefused, PlanRefused):
        return []
    chunk = chunk_of(parts, sites[0], derivation)
    return [
        Option(
            partial(_scheduled, parts, sites[0], derivation, each, chunk, constant, target),
            why=_noted(each, chunk),
        )
        for chunk in dict.fromkeys((chunk, 0))
        for each in plans
    ]


def _plans(product: Any, target: Device) -> list[Plan]:
    """Plans of the product alone."""
    from crossfuse.schedule.planned import rank_function

    return rank_function(product, target, keep=_TRIED, fused=True)


def _noted(plan: Plan, chunk: int) -> dict[str, Any]:
    return {
        "rows_first": {
            "tiles": dict(plan.tiles),
            "chunk": chunk,
            "microseconds_of_product": plan.microseconds,
        }
    }


def _scheduled(
    parts: Any,
    site: Any,
    derivation: Any,
    plan: Plan,
    chunk: int,
    constant: bool,
    target: Device,
) -> Any:
    from crossfuse.schedule.rules.rows_gemm import schedule_rows_gemm
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles

    tiles = TensorTiles(**plan.tiles)
    return schedule_rows_gemm(
        parts,
        site,
        derivation,
        tiles=tiles,
        chunk=chunk,
        constant_weights=constant,
        target=target,
    )
