"""Inverts quasi-affine maps over the integers: which iterations reach a given element.

A map takes an iteration x of a box to indices y. For a gradient that gathers, all x of one y are
wanted, as ``x = value(y, t)`` for t in a box of *axes*, under conditions; each x once.

Quotients and remainders become unknowns of their own, ``e = c*q + r`` with 0 <= r < c, so that all
is a system of linear equations over the integers, with bounds. It is solved by

1. splitting: of ``8*a + b = y`` with 0 <= b < 8 follows ``a = y//8`` and ``b = y%8``;
2. equations of one unknown: ``2*a = y`` gives ``a = y//2`` and the condition ``y%2 == 0``;
3. where neither helps, an *anchor*: the lattice of the solutions (a column Hermite form) says that
   an unknown takes every h-th value, ``a = p(y)%h + h*t``, and t becomes an axis. The unknown of
   the fewest values is taken, and the others follow from it by 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.quasi_affine import (
    Atom,
    Quotient,
    Sum,
    Symbol,
    constant,
    quotient,
    remainder,
    variable,
)


@dataclass(frozen=True)
class Condition:
    """That a number is 0, is not negative, or is less than an extent."""

    number: Sum
    #: ``"=="``, ``">="`` or ``"<"``.
    relation: str
    #: What stands on the right.
    limit: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.relation} {self.limit}"

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it holds where variables have these values."""
        return self._holds(self.number.value(values))

    def _holds(self, number: int) -> bool:
        if self.relation == "==":
            return number == self.limit
        return number >= self.limit if self.relation == ">=" else number < self.limit

    @property
    def is_proved(self) -> bool:
        """Whether it always holds."""
        least, most = self.number.bounds
        return self._holds(least) and self._holds(most)


@dataclass(frozen=True)
class Inverse:
    """All iterations that a map takes to an element, each of them once."""

    #: Variables that the element leaves free.
    axes: tuple[Symbol, ...]
    #: Each variable of the map by its name, from the element's indices and the axes.
    values: Mapping[str, Sum]
    #: What holds exactly where the values are an iteration that reaches the element.
    conditions: tuple[Condition, ...]


def invert(indices: Sequence[Sum], domain: Sequence[Symbol], places: Sequence[Symbol]) -> Inverse:
    """Invert ``indices(domain) = places``; the names of all these symbols differ."""
    system = _System()
    for each in domain:
        system.unknown(each)
    for index, place in zip(indices, places, strict=True):
        system.demand(index, variable(place))
    system.solve()
    values = {each.name: system.value(each) for each in domain}
    return Inverse(tuple(system.axes), values, tuple(dict.fromkeys(system.conditions)))


@dataclass
class _Equation:
    """A sum of multiples of unknowns, given by their numbers, that equals something known."""

    factors: dict[int, int]
    known: Sum


@dataclass
class _System:
    #: Unknowns by their atoms: a number, and what is to be added to its values, which start at 0.
    numbers: dict[Atom, tuple[int, int]] = field(default_factory=dict)
    extents: list[int] = field(default_factory=list)
    equations: list[_Equation] = field(default_factory=list)
    divided: set[tuple[Sum, int]] = field(default_factory=set)
    quotients: set[int] = field(default_factory=set)
    values: dict[int, Sum] = field(default_factory=dict)
    axes: list[Symbol] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)

    def value(self, atom: Atom) -> Sum:
        number, shift = self.numbers[atom]
        return self.values[number] + constant(shift)

    def unknown(self, atom: Atom) -> tuple[int, int]:
        """The number and shift of an unknown; what a quotient or remainder means joins."""
        if atom not in self.numbers:
            least, most = atom.bounds
            self.numbers[atom] = len(self.extents), least
            if isinstance(atom, Quotient):
                self.quotients.add(len(self.extents))
            self.extents.append(most - least + 1)
            if not isinstance(atom, Symbol):
                self._divide(atom.dividend, atom.divisor)
        return self.numbers[atom]

    def _divide(self, dividend: Sum, divisor: int) -> None:
        """Add the equation of a pair. In their simplest forms pairs of one number share parts."""
        if (dividend, divisor) not in self.divided:
            self.divided.add((dividend, divisor))
            parts = quotient(dividend, divisor) * divisor + remainder(dividend, divisor)
            self.equations.append(self._linear(dividend - parts))

    def _linear(self, number: Sum) -> _Equation:
        """The equation ``number = 0``."""
        factors: dict[int, int] = {}
        shifted = number.constant
        for atom, factor in number.terms:
            each, shift = self.unknown(atom)
            factors[each] = factors.get(each, 0) + factor
            shifted += factor * shift
        return _Equation(factors, constant(-shifted))

    def demand(self, number: Sum, known: Sum) -> None:
        """Add the equation ``number = known``."""
        equation = self._linear(number)
        equation.known += known
        self.equations.append(equation)

    def solve(self) -> None:
        for number, extent in enumerate(self.extents):
            if extent == 1:
                self._set(number, constant(0))
        while self.equations:
            self._settle()
            if self.equations:
                self._anchor()
        for number, extent in enumerate(self.extents):
            if number not in self.values:
                self._set(number, self._axis(extent))

    def _axis(self, extent: int) -> Sum:
        if extent == 1:
            return constant(0)
        self.axes.append(Symbol(f"t{len(self.axes)}", extent))
        return variable(self.axes[-1])

    def _require(self, number: Sum, relation: str, limit: int = 0) -> None:
        condition = Condition(number, relation, limit)
        if not condition.is_proved:
            self.conditions.append(condition)

    def _set(self, number: int, value: Sum) -> None:
        self.values[number] = value
        # A quotient is in range where its dividend and its remainder are.
        if number not in self.quotients:
            self._require(value, ">=")
            self._require(value, "<", self.extents[number])

    # Steps 1 and 2.

    def _settle(self) -> None:
        """Split equations and solve those of one unknown until nothing changes."""
        waiting, self.equations = self.equations, []
        while waiting:
            following = list(self._simpler(waiting.pop(0)))
            if len(following) == 1:
                self.equations += following
            else:
                # What is new may be what the others wait for.
                waiting, self.equations = [*waiting, *following, *self.equations], []

    def _simpler(self, equation: _Equation) -> Iterator[_Equation]:
        """No equation if it is solved, two if it is split, otherwise itself."""
        equation = self._with_values(equation)
        factors, known = equation.factors, equation.known
        common = gcd(*factors.values())
        if common == 0:
            self._require(known, "==")
            return
        if common > 1:
            self._require(remainder(known, common), "==")
            factors = {each: factor // common for each, factor in factors.items()}
            known = quotient(known, common)
        if len(factors) == 1:
            ((number, factor),) = factors.items()
            self._set(number, known * factor)  # the factor is 1 or -1
            return
        yield from self._split(factors, known)

    def _with_values(self, equation: _Equation) -> _Equation:
        known, factors = equation.known, {}
        for number, factor in equation.factors.items():
            if number in self.values:
                known -= self.values[number] * factor
            elif factor:
                factors[number] = factor
        return _Equation(factors, known)

    def _split(self, factors: dict[int, int], known: Sum) -> Iterator[_Equation]:
        """Digits: what a number divides, and a rest that has less than this number of values."""
        for step in sorted({abs(each) for each in factors.values()}):
            high = {each: factor for each, factor in factors.items() if factor % step == 0}
            low = {each: factor for each, factor in factors.items() if factor % step}
            ends = [factor * (self.extents[each] - 1) for each, factor in low.items()]
            least = sum(each for each in ends if each < 0)
            if low and sum(map(abs, ends)) < step:
                shifted = known - constant(least)
                high = {each: factor // step for each, factor in high.items()}
                yield _Equation(high, quotient(shifted, step))
                yield _Equation(low, remainder(shifted, step) + constant(least))
                return
        yield _Equation(factors, known)

    # Step 3.

    def _anchor(self) -> None:
        """Fix the unknown of the fewest values, with an axis if there are several."""
        unknowns = sorted({each for equation in self.equations for each in equation.factors})
        rows = [[each.factors.get(number, 0) for number in unknowns] for each in self.equations]
        lattice = solutions(rows, [each.known for each in self.equations])

        def count(place: int) -> int:
            step = lattice.step(place)
            return -(-self.extents[unknowns[place]] // step) if step else 1

        place = min(range(len(unknowns)), key=lambda each: (count(each), lattice.step(each)))
        step, start = lattice.step(place), lattice.start(place)
        if step:
            start = remainder(start, step) + self._axis(count(place)) * step
        self._set(unknowns[place], start)


@dataclass(frozen=True)
class Lattice:
    """All integer solutions of linear equations: an origin and the multiples of a basis."""

    #: For each unknown what it is at the origin. Meaningless where there is no solution.
    origin: tuple[Sum, ...]
    #: Vectors of the basis, one number for each unknown.
    basis: tuple[tuple[int, ...], ...]

    def step(self, place: int) -> int:
        """Distance of the values that an unknown takes; 0 if it takes one."""
        return gcd(*(each[place] for each in self.basis))

    def start(self, place: int) -> Sum:
        """A value that an unknown takes."""
        return self.origin[place]


def solutions(rows: Sequence[Sequence[int]], known: Sequence[Sum]) -> Lattice:
    """Solve ``rows * x = known`` over the integers, one equation after the other.

    Unimodular column operations leave each row one factor g, its pivot, as in a Hermite normal
    form: that coordinate is ``known / g``, and the other columns are the solutions of a zero.
    """
    width = len(rows[0])
    basis = [[int(row == column) for row in range(width)] for column in range(width)]
    origin = [constant(0)] * width
    for row, value in zip(rows, known, strict=True):
        for factor, each in zip(row, origin, strict=True):
            value -= each * factor
        _reduce(row, basis)
        products = [_dot(row, column) for column in basis]
        pivot = next((at for at, each in enumerate(products) if each), None)
        if pivot is None:
            continue  # the equation follows from others, or contradicts them
        column, factor = basis.pop(pivot), products[pivot]
        value = quotient(value if factor > 0 else value * -1, abs(factor))
        origin = [each + value * part for each, part in zip(origin, column, strict=True)]
    return Lattice(tuple(origin), tuple(map(tuple, basis)))


def _reduce(row: Sequence[int], basis: list[list[int]]) -> None:
    """Euclid's algorithm on columns, until at most one has a product with the row."""
    while True:
        products = [abs(_dot(row, column)) for column in basis]
        left = [at for at, each in enumerate(products) if each]
        if len(left) < 2:
            return
        least = min(left, key=lambda at: products[at])
        for at in left:
            if at != least:
                times = _dot(row, basis[at]) // _dot(row, basis[least])
                pairs = zip(basis[at], basis[least], strict=True)
                basis[at] = [one - times * other for one, other in pairs]


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


# Indices of loads as quasi-affine expressions, and back.


class NotAffineError(Exception):
    """An index that has no inverse over the integers; its text says why, with the part at fault."""


def affine(index: Any, symbols: Mapping[Any, Symbol]) -> Sum:
    """An index over variables; `NotAffineError` says what of it is not quasi-affine."""
    number = ir.constant(index)
    if number is not None:
        return constant(number)
    if isinstance(index, ir.Var) and index in symbols:
        return variable(symbols[index])
    if isinstance(index, ir.tirx.Cast) and "int" in str(index.ty):
        return affine(index.value, symbols)
    if isinstance(index, ir.tirx.Add | ir.tirx.Sub):
        one, other = affine(index.a, symbols), affine(index.b, symbols)
        return one + other if isinstance(index, ir.tirx.Add) else one - other
    if isinstance(index, ir.tirx.Mul):
        return _multiple(index, symbols)
    if isinstance(index, (*_QUOTIENTS, *_REMAINDERS)):
        return _divided(index, symbols)
    raise NotAffineError(f"{index} {_fault(index)}")


def _fault(index: Any) -> str:
    if ir.buffer_loads(index):
        return "is data"
    if isinstance(index, ir.Var):
        return "is a number that only a call knows"
    return "is no sum, multiple, quotient or remainder"


def _multiple(index: Any, symbols: Mapping[Any, Symbol]) -> Sum:
    one, other = affine(index.a, symbols), affine(index.b, symbols)
    if one.terms and other.terms:
        raise NotAffineError(f"{index} is a product of variables")
    return one * other.constant if one.terms else other * one.constant


_QUOTIENTS = (ir.tirx.FloorDiv, ir.tirx.Div)
_REMAINDERS = (ir.tirx.FloorMod, ir.tirx.Mod)


def _divided(index: Any, symbols: Mapping[Any, Symbol]) -> Sum:
    dividend, divisor = affine(index.a, symbols), affine(index.b, symbols)
    if divisor.terms or divisor.constant == 0:
        raise NotAffineError(f"{index} is divided by {index.b}, which is no constant")
    truncates = isinstance(index, ir.tirx.Div | ir.tirx.Mod)
    if truncates and (dividend.bounds[0] < 0 or divisor.constant < 0):
        raise NotAffineError(f"{index} rounds towards 0, and one of both may be negative")
    # A quotient stays as it is where both change signs, a remainder changes its own.
    sign = 1 if divisor.constant > 0 else -1
    dividend, number = dividend * sign, divisor.constant * sign
    if isinstance(index, _QUOTIENTS):
        return quotient(dividend, number)
    return remainder(dividend, number) * sign


# Back to TVM.


_RELATIONS = {"==": ir.tirx.EQ, ">=": ir.tirx.GE, "<": ir.tirx.LT}


class Writer:
    """Writes quasi-affine expressions in given variables."""

    def __init__(self, variables: Mapping[Symbol, Any], dtype: str) -> None:
        self._variables = dict(variables)
        self._dtype = dtype

    def number(self, expression: Sum) -> Any:
        """An expression as TVM has it."""
        parts = [self._term(atom, factor) for atom, factor in expression.terms]
        if expression.constant or not parts:
            parts.append(self._constant(expression.constant))
        found = parts[0]
        for each in parts[1:]:
            found = found + each
        return found

    def condition(self, condition: Condition) -> Any:
        """A condition as TVM has it."""
        relation = _RELATIONS[condition.relation]
        return relation(self.number(condition.number), self._constant(condition.limit))

    def _constant(self, number: int) -> Any:
        return ir.tirx.IntImm(self._dtype, number)

    def _term(self, atom: Atom, factor: int) -> Any:
        found = self._atom(atom)
        return found if factor == 1 else found * self._constant(factor)

    def _atom(self, atom: Atom) -> Any:
        if isinstance(atom, Symbol):
            return self._variables[atom]
        node = ir.tirx.FloorDiv if isinstance(atom, Quotient) else ir.tirx.FloorMod
        return node(self.number(atom.dividend), self._constant(atom.divisor))
