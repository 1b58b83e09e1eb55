"""Sites: where a cascade stands in a function, with what its symbols read and its results write.

Expressions of TVM are over the site's own variables: `Site.rows`, `Site.axis`, and the columns of a
stage or an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import Fence
from crossfuse.cascade.spec import Cascade
from crossfuse.errors import CascadeRefused, refuse


@dataclass(frozen=True, eq=False)
class StageSite:
    """A stage in the function."""

    #: Name of its block.
    block: str
    #: The buffer that it writes.
    buffer: Any
    #: Loops of its result beyond the rows: the head dimension of attention, n of a product.
    columns: tuple[Any, ...]
    #: Type that the function accumulates in.
    dtype: str


@dataclass(frozen=True, eq=False)
class OutputSite:
    """An output buffer of the function and where a result is stored there."""

    #: The key in `Cascade.results` or `Cascade.rows`.
    name: str
    #: A parameter.
    buffer: Any
    #: Over rows, columns and (of `Cascade.rows`) the axis.
    indices: tuple[Any, ...]
    #: Loops beyond the rows and the axis; for ``topk`` the last stands for the place.
    columns: tuple[Any, ...]

    @property
    def dtype(self) -> str:
        """Type of what is stored."""
        return str(self.buffer.ty.dtype)


@dataclass(frozen=True, eq=False)
class Site:
    """A cascade in a function.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        The plain one, with a block for each operator.
    cascade : Cascade
        Its algebra.
    rows : tuple[tvm.tirx.Var, ...]
        Loops that all stages share.
    axis : tvm.tirx.Var
        The reduced loop.
    extents : Mapping[tvm.tirx.Var, int]
        Of rows, axis and columns.
    reads : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What each element and invariant stands for: usually one load, in the type of its buffer.
    stages : Mapping[str, StageSite]
        By name.
    outputs : tuple[OutputSite, ...]
        In the order of the function's parameters.
    producers : Mapping[sympy.Symbol, str]
        Elements that another reduction of the function makes (the scores of attention), with the
        name of its block; such a block reduces another axis, once for each element.
    after : crossfuse.cascade.rewrite.rows_first.RowsFirst | None
        The function that this one was cut from, with the product that follows; None of a whole.
    sums : crossfuse.cascade.rewrite.rows_first.ColumnSums | None
        The same of a function that adds some of the outputs up over the rows.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> site = detect(func)[0]
    >>> len(site.cascade.stages)
    2
    """

    function: Any
    cascade: Cascade
    rows: tuple[Any, ...]
    axis: Any
    extents: Mapping[Any, int]
    reads: Mapping[sympy.Symbol, Any]
    stages: Mapping[str, StageSite]
    outputs: tuple[OutputSite, ...]
    producers: Mapping[sympy.Symbol, str]
    after: Any = None
    sums: Any = None

    @property
    def stored(self) -> tuple[OutputSite, ...]:
        """Outputs that are not added up over the rows instead."""
        summed = () if self.sums is None else self.sums.terms
        return tuple(each for each in self.outputs if each.name not in summed)

    @property
    def has_products(self) -> bool:
        """Whether a product makes elements, or results have columns."""
        return bool(self.producers) or any(each.columns for each in self.stages.values())


# States are kept in float32: whether reductions of integers are exact there.

#: All whole numbers up to this one are float32 numbers.
EXACT = 2**24


def check_exact(site: Site) -> None:
    """Refuse a reduction of integers that float32 does not hold.

    Flags, counts of them, positions and 8-bit numbers are held. What wraps around in its own type
    is not: states do not.
    """
    known: dict[sympy.Symbol, sympy.Expr] = {}

    def largest(symbol: sympy.Symbol) -> sympy.Expr:
        return known[symbol] if symbol in known else _of_read(site, symbol)

    for stage in site.cascade.stages:
        made = site.stages[stage.name]
        if "int" not in made.dtype or stage.monoid.name not in ("sum", "prod", "max", "min"):
            continue
        each = bound(stage.term, largest)
        whole = _reduced(stage.monoid.name, each, int(site.extents[site.axis]))
        known[stage.symbol] = whole
        if whole > EXACT or _wraps(made.dtype, stage.term, whole):
            size = "of any size" if whole.is_infinite else f"up to {int(whole)}"
            raise refuse(
                CascadeRefused,
                "cascade-integers",
                f"block '{made.block}', buffer '{made.buffer.name}'",
                found=f"a {stage.monoid.name} in {made.dtype} of numbers {size}",
                limit=f"{EXACT}, up to which float32 has all, and what {made.dtype} holds",
                instead="leave it to a kernel that reduces integers, or convert them before",
            )


def _of_read(site: Site, symbol: sympy.Symbol) -> sympy.Expr:
    """The largest magnitude of what a symbol reads; infinite if that is no whole number."""
    read = site.reads.get(symbol)
    if read is None:
        return sympy.oo
    if isinstance(read, ir.Var) and read in site.extents:
        return sympy.Integer(int(site.extents[read]))
    number, dtype = ir.constant(read), str(read.ty)
    if number is not None or dtype == "bool":
        return sympy.Integer(1 if number is None else abs(number))
    return (
        sympy.Integer(-int(np.iinfo(dtype).min) or np.iinfo(dtype).max)
        if "int" in dtype
        else sympy.oo
    )


def _reduced(operator: str, each: sympy.Expr, extent: int) -> sympy.Expr:
    if operator == "sum":
        return each * extent
    return each**extent if operator == "prod" else each


def _wraps(dtype: str, term: sympy.Expr, size: sympy.Expr) -> bool:
    if term.is_Symbol:
        return False
    below = dtype.startswith("uint") and not term.is_nonnegative
    return bool(below or size > int(np.iinfo(dtype).max))


def bound(term: sympy.Basic, largest: Callable[[sympy.Symbol], sympy.Expr]) -> sympy.Expr:
    """The largest magnitude of a whole expression; infinite where nothing is known.

    `largest` is the largest magnitude of a symbol.
    """
    if term.is_number:
        return sympy.Abs(term)
    if isinstance(term, sympy.Symbol):
        return largest(term)
    if isinstance(term, sympy.Piecewise):
        return sympy.Max(*(bound(value, largest) for value, _ in term.args))
    parts = [bound(each, largest) for each in term.args]
    if isinstance(term, sympy.Add):
        return sympy.Add(*parts)
    if isinstance(term, sympy.Mul):
        return sympy.Mul(*parts)
    if isinstance(term, sympy.Max | sympy.Min | sympy.Abs | Fence):
        return sympy.Max(*parts)
    if isinstance(term, sympy.Pow) and term.args[1].is_Integer and term.args[1] > 0:
        return parts[0] ** term.args[1]
    return sympy.oo
