"""Options to schedule a cascade of reductions, the best one first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.choice import not_fusing, noted
from crossfuse.planner.families import ROWS
from crossfuse.schedule.cascades import only_site, schedule_cascade

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan


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
    from crossfuse.cascade.rewrite.rows_first import sites_of

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
    from crossfuse.planner.cascade.plan import ranked_cascade
    from crossfuse.planner.cascade.rows_product import rows_product_of
    from crossfuse.planner.cascade.rows_space import RowsTiles
    from crossfuse.planner.cascade.shape import CascadeShape
    from crossfuse.schedule.rules.rows_gemm import rows_before_product

    try:
        return _one_cascade(source, target, plan, constant, placement)
    except (CascadeRefused, PlanRefused):
        # What is no stream as a whole may be rows and a product.
        free = plan is None and placement == "auto"
        product = rows_product_of(source.func) if free else None
        if product is None:
            raise
    shape = CascadeShape(source.summary, product.rows, (), product)
    return _options(
        ranked_cascade(shape, target, only=(ROWS,)),
        lambda each: rows_before_product(source.func, RowsTiles(**each.tiles), constant),
    )


def _one_cascade(
    source: Source, target: Device, plan: CascadePlan | None, constant: bool, placement: str
) -> list[Option]:
    """Options to schedule the whole function as one cascade."""
    from crossfuse import _tvm as ir
    from crossfuse.cascade.algebra import derive
    from crossfuse.planner.cascade.plan import placed_cascade, ranked_cascade
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
    return _options(
        every,
        lambda each: schedule_cascade(
            site, derivation, each.family, each.tiles, constant_weights=constant
        ),
    )


def _options(plans: Sequence[CascadePlan], make: Callable[[CascadePlan], Any]) -> list[Option]:
    """Options that follow plans, the fastest first, which `make` schedules."""
    eager = not_fusing(plans)
    return [
        Option(
            partial(make, each),
            each,
            {each.family: dict(each.tiles), "plan": noted(each, eager)},
        )
        for each in plans
    ]
