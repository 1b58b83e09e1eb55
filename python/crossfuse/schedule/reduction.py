"""Analyses a reduction for `dsm_reduce`, and refuses those that it cannot split."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    bindings,
    binds,
    combiner,
    constant_extent,
    function,
    is_reduction,
    name_of,
    position,
    realize,
    written_buffer,
)
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import MAX_CLUSTER
from crossfuse.schedule.primitive import check_agreement, check_axis, check_not_within
from crossfuse.schedule.tiles import check_dtype, is_sampled_tile, symbolic_extent, tile_extents

# Shares of a reduction over a number of CTAs that does not divide its extent.


def has_last_share(predicate: Any, rank: Any, loops: list[Any]) -> bool:
    """Whether the last rank has at least one iteration of a masked reduction.

    A rank without one would not initialise its partial result either: TVM masks the initialisation
    together with the update. False only if the block's predicate rules out the first iteration of
    the last rank; `rank` is the loop over ranks, `loops` are all loops around the block.
    """
    first = {loop.loop_var: loop.min for loop in loops}
    first[rank.loop_var] = rank.min + rank.extent - 1
    value = ir.sym.Analyzer().simplify(ir.substitute(predicate, lambda var: first.get(var, var)))
    return ir.constant(value) != 0


@dataclass(frozen=True)
class Reduction:
    """A reduction and the loop that becomes the rank, read before anything is changed."""

    #: Block and loop, as refusals name them.
    where: str
    #: Cluster axis of the ranks.
    axis: str
    #: Loops outside the rank loop; they walk over tiles.
    depth: int
    #: CTAs, as the trace knows the number.
    ranks: Any
    #: CTAs, as a number.
    count: int
    #: Of the tile, by dimension of the result.
    extents: tuple[int, ...]
    #: Whether a mutation of the trace may change them.
    sampled: bool
    #: Whether the block writes a parameter of the function.
    output: bool
    #: Whether every rank has the same share of the reduction, so that no iteration is masked.
    exact: bool

    @property
    def elements(self) -> int:
        """Elements of the tile."""
        return prod(self.extents)


def read_reduction(sch: Any, rule: str, block: Any, loop: Any, axis: str) -> Reduction:
    """Analyse a reduction and the loop that becomes the rank.

    Refused are a block that is no reduction that can be split, and a loop that is not one of its
    reduction loops with an extent that fits the cluster.
    """
    loops, depth = position(sch, rule, block, loop)
    where = f"{name_of(sch, block)}, {name_of(sch, loop)}"
    check_axis(rule, where, axis)
    _check_combiner(sch, rule, where, block)
    _check_reduction_loop(sch, rule, where, block, loop)
    count = _check_extent(sch, rule, where, loop)
    _check_outside(sch, rule, where, block, loops[:depth])
    check_not_within(rule, where, [sch.get(each) for each in loops[:depth]], axis)
    check_agreement(sch, rule, where, loop, axis, count)
    check_dtype(rule, where, written_buffer(sch, block))
    _check_shares(sch, rule, where, block, loop, loops)
    return Reduction(
        where=where,
        axis=axis,
        depth=depth,
        ranks=symbolic_extent(sch, rule, loop),
        count=count,
        extents=tile_extents(sch, block, loop),
        sampled=is_sampled_tile(sch, block, loop),
        output=_is_output(sch, block),
        exact=_is_exact(sch, block),
    )


def _check_combiner(sch: Any, rule: str, where: str, block: Any) -> None:
    if combiner(sch, block) is None:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="a block without one initialised sum, product, max or min",
            limit="a reduction by sum, product, max or min that is not decomposed",
            instead="call dsm_reduce on the reduction block itself, before decompose_reduction",
        )


def _check_reduction_loop(sch: Any, rule: str, where: str, block: Any, loop: Any) -> None:
    variable = sch.get(loop).loop_var
    users = [each for each, value in bindings(sch, block) if binds(variable, value)]
    if not users or not all(is_reduction(each) for each in users):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="a loop over output elements" if users else "a loop that the block does not use",
            limit="a reduction loop",
            instead="split a reduction loop of the block and pass the part that becomes the rank; "
            "for a loop over output elements use cluster_bind",
        )


def _check_extent(sch: Any, rule: str, where: str, loop: Any) -> int:
    extent = constant_extent(sch, rule, loop)
    serial = int(sch.get(loop).kind) == int(ir.ForKind.SERIAL)
    if not serial or not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}" if serial else "a loop that is already bound",
            limit=f"a serial loop of extent 1 to {MAX_CLUSTER}, one iteration a CTA",
            instead="split the reduction loop by the number of CTAs and pass that part",
        )
    return extent


def _check_outside(sch: Any, rule: str, where: str, block: Any, outside: list[Any]) -> None:
    """Refuse a reduction loop around the ranks: each of its iterations would combine anew."""
    for loop in outside:
        variable = sch.get(loop).loop_var
        users = [each for each, value in bindings(sch, block) if binds(variable, value)]
        if any(is_reduction(each) for each in users):
            raise refuse(
                ScheduleRefused,
                rule,
                where,
                found=f"reduction loop '{variable.name}' outside it",
                limit="loops over output elements outside the loop that becomes the rank",
                instead="reorder the reduction loops so that this one is the outermost",
            )


def _check_shares(sch: Any, rule: str, where: str, block: Any, loop: Any, loops: list[Any]) -> None:
    nodes = [sch.get(each) for each in loops]
    if not has_last_share(realize(sch, block).predicate, sch.get(loop), nodes):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"no share of the reduction for the last of {sch.get(loop).extent} CTAs",
            limit="an iteration for every CTA, which initialises its partial result",
            instead="split the reduction loop by fewer CTAs, or by a number that divides it",
        )


def _is_output(sch: Any, block: Any) -> bool:
    written = written_buffer(sch, block)
    return any(each.same_as(written) for each in function(sch, block).params)


def _is_exact(sch: Any, block: Any) -> bool:
    """Whether the block's predicate does not mask its reduction."""
    predicate = realize(sch, block).predicate
    reduced = [value for each, value in bindings(sch, block) if is_reduction(each)]
    return not any(
        binds(variable, predicate) for value in reduced for variable in ir.variables(value)
    )
