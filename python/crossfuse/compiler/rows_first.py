"""Options to schedule a product whose left operand a cascade makes, as one kernel.

For functions that are one cascade as a whole the planner weighs these against others (family
``rows``, see `crossfuse.planner.cascade.rows_space`); these options are for all other functions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.errors import CascadeRefused, PlanRefused
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

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
