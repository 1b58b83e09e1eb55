"""Specifies a cascade: reductions over one axis, each of whose terms may use earlier results.

Terms are sympy expressions over real symbols of three kinds:

elements
    Change along the axis: one number of a tensor, already read, and the axis's own index.
invariants
    Are the same along the axis: tensors of the rows, scalars, indices of the rows. Columns of a
    result (the head dimension of the output of attention) do not matter to the algebra: each
    column is a cascade of its own that shares the other stages.
results
    Come from earlier stages, and are named as these.

A mask is ``sympy.Piecewise((x, condition), (-sympy.oo, True))``, its condition over elements and
invariants. No symbol stands for an infinity: elements may be -oo, and masks say where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
from sympy.core.relational import Relational

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import Compared, Fence
from crossfuse.errors import CascadeRefused, refuse

# Reduction operators.

#: Reductions whose state is one number.
SCALAR = ("sum", "prod", "max", "min", "logaddexp")
#: Reductions whose state is a number and its position.
INDEXED = ("argmax", "argmin")
#: Reductions whose state is the k largest numbers and their positions.
RANKED = ("topk",)


@dataclass(frozen=True)
class Monoid:
    """A reduction operator: associative, commutative, with an identity."""

    #: One of `SCALAR`, `INDEXED` and `RANKED`.
    name: str
    #: The number of results of ``topk``, in descending order; 0 for others. Of equal numbers that
    #: of the lower index comes first.
    k: int = 0

    @property
    def identity(self) -> sympy.Expr:
        """The value that changes nothing: 0, 1 or an infinity."""
        return {
            "sum": sympy.S.Zero,
            "prod": sympy.S.One,
            "max": -sympy.oo,
            "min": sympy.oo,
            "logaddexp": -sympy.oo,
            "argmax": -sympy.oo,
            "argmin": sympy.oo,
            "topk": -sympy.oo,
        }[self.name]

    @property
    def ordered(self) -> bool:
        """Whether it chooses among its elements."""
        return self.name not in ("sum", "prod", "logaddexp")

    @property
    def keeps_places(self) -> bool:
        """Whether its state says where elements stood."""
        return self.name in (*INDEXED, *RANKED)

    @property
    def count(self) -> int:
        """Elements that its state keeps."""
        return max(self.k, 1)

    def combine(self, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
        """Combine two states of a `SCALAR` reduction in one expression; of others a ValueError."""
        if self.name not in SCALAR:
            raise ValueError(f"{self.name} combines more than one number")
        if self.name == "logaddexp":
            return sympy.log(sympy.exp(left) + sympy.exp(right))
        operators = {"sum": sympy.Add, "prod": sympy.Mul, "max": sympy.Max, "min": sympy.Min}
        return operators[self.name](left, right)


SUM = Monoid("sum")
PROD = Monoid("prod")
MAX = Monoid("max")
MIN = Monoid("min")
LOGADDEXP = Monoid("logaddexp")
ARGMAX = Monoid("argmax")
ARGMIN = Monoid("argmin")


def topk(k: int) -> Monoid:
    """The reduction to the `k` largest numbers."""
    return Monoid("topk", k)


@dataclass(frozen=True)
class Stage:
    """One reduction of a cascade."""

    #: Of its result. The position of ``argmax``, ``argmin`` and ``topk`` is ``name_index``.
    name: str
    monoid: Monoid
    #: The reduced expression, over elements, invariants and results of earlier stages.
    term: sympy.Expr
    #: Type that the term is rounded to before it is reduced or multiplied, such as
    #: ``"float8_e4m3fn"``; empty where nothing is rounded that an exact derivation would not round.
    cast: str = ""

    @property
    def symbol(self) -> sympy.Symbol:
        """Its result in later terms; of ``topk`` any one of the numbers."""
        return sympy.Symbol(self.name, real=True)

    @property
    def index_symbol(self) -> sympy.Symbol | None:
        """The position of the result, if the reduction has one; else None."""
        return position(self.name) if self.monoid.keeps_places else None


def position(name: str) -> sympy.Symbol:
    """The symbol of the position of a reduction's result."""
    return sympy.Symbol(f"{name}_index", integer=True, nonnegative=True)


@dataclass(frozen=True)
class Cascade:
    """Reductions over one axis, in an order in which each uses earlier results only.

    Attributes
    ----------
    stages : tuple[Stage, ...]
        At least one.
    elements : tuple[sympy.Symbol, ...]
        Symbols that change along the axis, its index (if used) among them. Their assumptions are
        trusted: ``positive=True`` must hold.
    invariants : tuple[sympy.Symbol, ...]
        Symbols that do not.
    results : Mapping[str, sympy.Expr]
        What is wanted of a row, over results of stages and invariants, by name.
    rows : Mapping[str, sympy.Expr]
        What is wanted of each element, over elements, results and invariants, by name: a softmax,
        normalised or quantised rows.
    index : sympy.Symbol | None
        The axis's index, an integer, if terms use it.
    length : sympy.Symbol | None
        The symbol among the invariants that stands for the number of elements, if terms use it.
    firsts : Mapping[sympy.Symbol, sympy.Symbol]
        Elements whose first one of a row may be loaded at any time, and symbols of that one: a
        place to measure distances from.

    Examples
    --------
    >>> import sympy
    >>> from crossfuse.cascade.spec import MAX, SUM
    >>> x = sympy.Symbol("x", real=True)
    >>> m = Stage("m", MAX, x)
    >>> s = Stage("s", SUM, sympy.exp(x - m.symbol))
    >>> [each.name for each in Cascade((m, s), (x,)).stages]
    ['m', 's']
    """

    stages: tuple[Stage, ...]
    elements: tuple[sympy.Symbol, ...]
    invariants: tuple[sympy.Symbol, ...] = ()
    results: Mapping[str, sympy.Expr] = field(default_factory=dict)
    rows: Mapping[str, sympy.Expr] = field(default_factory=dict)
    index: sympy.Symbol | None = None
    length: sympy.Symbol | None = None
    firsts: Mapping[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)

    def stage(self, name: str) -> Stage:
        """The stage of a name.

        Parameters
        ----------
        name : str
            As `Stage.name`.

        Returns
        -------
        Stage
            The reduction.
        """
        return next(each for each in self.stages if each.name == name)


# Derivations: the state of a cascade, and how it is initialised, updated, merged and finished.
#
# The state is a tuple of slots. Expressions of a slot use
#
#     m           the slot m of the state so far
#     m'          the slot m after this step, of slots that come earlier in the order; see `new`
#     m_a, m_b    the slots of the two states that are merged; see `left`, `right`
#
# beside the cascade's elements and invariants. One step takes in a tile of any number of elements:
#
#     for slot in slots:    # in order
#         slot' = carry  (+)  reduce over the tile of contribution
#
# and two states merge as ``slot' = merge``. Every segment of the axis may be reduced on its own.


@dataclass(frozen=True)
class Slot:
    """One number of the state (of ``topk``: k numbers and their indices)."""

    #: Such as ``"m"``.
    name: str
    #: Combines carry and contributions.
    monoid: Monoid
    #: That of one element, over elements, invariants, new values of earlier slots and values so
    #: far.
    contribution: sympy.Expr
    #: The value so far as seen from the new values of earlier slots: ``s*exp(m - m')``. The slot's
    #: own symbol alone where nothing is to be corrected.
    carry: sympy.Expr
    #: The merged value, over `left`, `right` and new values of earlier slots; None for ``argmax``,
    #: ``argmin`` and ``topk``, whose states merge as their elements do.
    merge: sympy.Expr | None
    #: The value of no elements.
    init: sympy.Expr
    #: What other slots, results and rows use in place of the slot's new value, over `new` of the
    #: slot: 0 where a maximum is -oo, 1 where a largest magnitude is 0. None: the value itself.
    #: Expressions name it `guarded`.
    guard: sympy.Expr | None = None

    @property
    def symbol(self) -> sympy.Symbol:
        """The value so far."""
        return value(self.name)

    @property
    def corrected(self) -> bool:
        """Whether a step corrects the value so far before it adds to it."""
        return self.carry != self.symbol


@dataclass(frozen=True)
class Factor:
    """One product ``G(x) * H(d)`` of a stage's term."""

    #: G, over elements and invariants.
    element: sympy.Expr
    #: H, over results of earlier stages and invariants.
    context: sympy.Expr
    #: The slot that reduces G, in whatever scale.
    slot: str


@dataclass(frozen=True)
class Step:
    """How one stage was derived."""

    #: Its name.
    stage: str
    #: The distributive pair, as text: ``"sum, *"``; empty for a stage of no earlier results.
    pair: str
    #: One for a separable term, several for a sum that was split.
    factors: tuple[Factor, ...]
    #: Earlier results that correct the state while it streams.
    rescaling: tuple[str, ...]
    #: Earlier results that are applied once, to the finished state.
    hoisted: tuple[str, ...]
    #: The factor (or addend) of the carry, over `value` and `new`; None without one.
    correction: sympy.Expr | None
    #: How the separation was shown, in words.
    proof: str
    #: Remarks for a reader: guards, identities, stable forms.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derivation:
    """A cascade that streams.

    Attributes
    ----------
    cascade : Cascade
        What it was derived from.
    slots : tuple[Slot, ...]
        The state, in the order of updates.
    stages : Mapping[str, sympy.Expr]
        The result of each stage, over slots (`value`, `guarded`) and invariants.
    results : Mapping[str, sympy.Expr]
        As `Cascade.results`, over slots and invariants, defined for masked and zero rows too.
    rows : Mapping[str, sympy.Expr]
        As `Cascade.rows`, over elements, slots and invariants.
    steps : tuple[Step, ...]
        How, a stage each.
    exact : bool
        Whether real arithmetic gives what the two-pass definition gives. False where a type inside
        rounds (`reason`).
    reason : str
        Why not exact; empty if it is.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> found = derive(detect(func)[0].cascade)
    >>> [each.name for each in found.slots]
    ['m', 's']
    """

    cascade: Cascade
    slots: tuple[Slot, ...]
    stages: Mapping[str, sympy.Expr]
    results: Mapping[str, sympy.Expr] = field(default_factory=dict)
    rows: Mapping[str, sympy.Expr] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    exact: bool = True
    reason: str = ""

    def slot(self, name: str) -> Slot:
        """The slot of a name.

        Parameters
        ----------
        name : str
            Such as that of a reduction.

        Returns
        -------
        Slot
            The first of that name.
        """
        return next(each for each in self.slots if each.name == name)


def check_extremes(derivation: Derivation) -> None:
    """Refuse an extreme over earlier results beside rows that have its terms, or compare with it.

    The least quotient by a sum is one of the least element, and rows are products with a
    reciprocal: none of them is equal to it, and a gradient finds no element that it is of. Only
    what is written is refused: rows that are computed further need not be equal to anything.
    """
    rows = set(derivation.cascade.rows.values())
    compared = {side for row in rows for test in row.atoms(Relational) for side in test.args}
    for step in derivation.steps:
        stage = derivation.cascade.stage(step.stage)
        if stage.monoid.name not in ("max", "min") or not step.pair:
            continue
        terms = {stage.term, *(stage.term.args if isinstance(stage.term, sympy.Abs) else ())}
        if terms & rows or compared & {stage.symbol, Compared(stage.symbol)}:
            raise refuse(
                CascadeRefused,
                "cascade-form",
                f"stage {stage.name}",
                found=f"a {stage.monoid.name} over earlier results, of terms that rows have too",
                limit="an extreme that is equal to one of the rows, which are rounded otherwise",
                instead="cut the cascade before this stage: it is then taken of what rows store",
            )


def value(name: str) -> sympy.Symbol:
    """The symbol of a slot in the state so far, or in the finished state."""
    return sympy.Symbol(name, real=True)


def new(name: str) -> sympy.Symbol:
    """The symbol of a slot after the current step."""
    return sympy.Symbol(f"{name}'", real=True)


def old(name: str) -> sympy.Symbol:
    """The symbol of a slot as it was before a step, or a merge, that has changed it already."""
    return sympy.Symbol(f"{name}^", real=True)


def guarded(name: str) -> sympy.Symbol:
    """The symbol of a slot's new value, or of what stands in for it where it has no inverse."""
    return sympy.Symbol(f"{name}~", real=True)


def left(name: str) -> sympy.Symbol:
    """The symbol of a slot of the first of two merged states."""
    return sympy.Symbol(f"{name}_a", real=True)


def right(name: str) -> sympy.Symbol:
    """The symbol of a slot of the second of two merged states."""
    return sympy.Symbol(f"{name}_b", real=True)


# Sites: where a cascade stands in a function, with what its symbols read and its results write.
#
# Expressions of TVM are over the site's own variables: `Site.rows`, `Site.axis`, and the columns of
# a
# stage or an output.


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
