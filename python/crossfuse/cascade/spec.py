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

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

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
