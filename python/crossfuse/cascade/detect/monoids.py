"""What a reduction block combines with."""

from __future__ import annotations

import sympy

from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.program import Program
from crossfuse.cascade.detect.refusal import refused
from crossfuse.cascade.expressions.to_sympy import number
from crossfuse.cascade.monoid import Monoid, topk

_NAMES = {"product": "prod"}


def monoid_of(program: Program, block: Block, term: sympy.Expr) -> Monoid:
    """Say what a reduction combines with.

    Parameters
    ----------
    program : Program
        The function.
    block : Block
        The reduction.
    term : sympy.Expr
        What it reduces.

    Returns
    -------
    Monoid
        The operator.

    Raises
    ------
    CascadeRefused
        If the reduction starts from a value that changes its result.
    """
    if block.combine == "topk":
        return topk(block.k)  # type: ignore[attr-defined]
    monoid = Monoid(_NAMES.get(block.combine, block.combine))
    start = number(block.initial)
    if start != monoid.identity and not _harmless(monoid, start, block, term):
        what = f"an initial value {start} of a {monoid.name}"
        limit = f"{monoid.identity}, which changes nothing"
        instead = f"start at {monoid.identity}, and combine the result with {start} afterwards"
        raise refused(f"{block.where}, buffer '{block.buffer.name}'", what, limit, instead)
    return monoid


def _harmless(monoid: Monoid, start: sympy.Expr, block: Block, term: sympy.Expr) -> bool:
    """Whether a maximum or minimum starts beyond all that it may meet."""
    if not monoid.ordered:
        return False
    lowest = -_largest(str(block.buffer.ty.dtype))
    if monoid.name in ("min", "argmin"):
        start, term = -start, -term
    if start <= lowest:
        return True
    return bool(start <= 0 and term.is_nonnegative and monoid.name in ("max", "min"))


def _largest(dtype: str) -> sympy.Expr:
    import ml_dtypes
    import numpy as np

    if "float" in dtype:
        return sympy.Rational(float(ml_dtypes.finfo(getattr(ml_dtypes, dtype, dtype)).max))
    return sympy.Integer(int(np.iinfo(dtype).max))
