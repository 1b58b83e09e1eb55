"""Shares of a reduction over a number of CTAs that does not divide its extent."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


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
