"""Which CTAs have a share of a reduction whose extent their number does not divide."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


def has_last_share(predicate: Any, rank: Any, loops: list[Any]) -> bool:
    """Whether the last rank has at least one iteration of a masked reduction.

    A rank without one would not initialise its partial result either: TVM masks the
    initialisation together with the update.

    Parameters
    ----------
    predicate : Expr
        Mask of the block.
    rank : For
        The loop over the ranks.
    loops : list[For]
        All loops around the block.

    Returns
    -------
    bool
        False only if the mask rules out the first iteration of the last rank.
    """
    first = {loop.loop_var: loop.min for loop in loops}
    first[rank.loop_var] = rank.min + rank.extent - 1
    value = ir.sym.Analyzer().simplify(ir.substitute(predicate, lambda var: first.get(var, var)))
    return ir.constant(value) != 0
