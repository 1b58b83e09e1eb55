"""Ways to schedule a product whose left operand a cascade makes, as one kernel.

Of functions that are one cascade as a whole the planner chooses among these and others (family
``rows``, see `crossfuse.planner.cascade.rows_space`); here are those of all others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.errors import CascadeRefused, PlanRefused
from crossfuse.hardware import Device
from crossfuse.planner.families import EAGER

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Plans of the product that are tried: the first may have too many sums beside the rows.
_TRIED = 6
#: Elements of a chunk of a row, and rows of a CTA from which on rows are made chunk by chunk.
_CHUNK, _MANY = 512, 8


def rows_first_options(func: Any, target: Device, constant: bool = False) -> list[Option]:
    """Ways to make rows, and their product, in two phases of one kernel.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form.
    target : Device
        What to schedule for.
    constant : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    list[Option]
        The product's tiles are those that it would have alone, the fastest first. None if the
        function has another form.
    """
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.cascade.rewrite.rows_first import rows_first
    from crossfuse.cascade.rewrite.streaming import streaming

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
    chunks = [_CHUNK] if _comes_by_chunks(parts, sites[0], derivation, target) else []
    return [
        Option(
            partial(_scheduled, parts, sites[0], derivation, each, chunk, constant),
            why=_noted(each, chunk),
        )
        for chunk in (*chunks, 0)
        for each in plans
    ]


def _comes_by_chunks(parts: Any, site: Any, derivation: Any, target: Device) -> bool:
    """Whether rows can be made by chunks, and the product would wait long for whole ones."""
    from crossfuse.cascade.rewrite.row_chunks import row_chunks

    if int(site.extents[site.rows[0]]) < _MANY * target.sms:
        return False
    try:
        return row_chunks(parts, site, derivation, _CHUNK).chunks > 1
    except CascadeRefused:
        return False


def _plans(product: Any, target: Device) -> list[Plan]:
    """Plans of the product alone."""
    from crossfuse.schedule.planned import rank_function

    return [each for each in rank_function(product, target, keep=_TRIED) if each.family != EAGER]


def _noted(plan: Plan, chunk: int) -> dict[str, Any]:
    return {
        "rows_first": {
            "tiles": dict(plan.tiles),
            "chunk": chunk,
            "microseconds_of_product": plan.microseconds,
        }
    }


def _scheduled(
    parts: Any, site: Any, derivation: Any, plan: Plan, chunk: int, constant: bool
) -> Any:
    from crossfuse.schedule.rules.rows_gemm import schedule_rows_gemm
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles

    tiles = TensorTiles(**plan.tiles)
    return schedule_rows_gemm(
        parts, site, derivation, tiles=tiles, chunk=chunk, constant_weights=constant
    )
