"""Quasi-affine expressions of integers: sums of variables, quotients and remainders.

They are values, so that the inversion of maps needs no compiler: it asks for exact bounds and for
divisibility, and compares what it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TypeAlias


@dataclass(frozen=True)
class Symbol:
    """A variable of the values 0 to ``extent - 1``."""

    name: str
    extent: int

    def __str__(self) -> str:
        return self.name

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and largest value."""
        return 0, self.extent - 1


@dataclass(frozen=True)
class Quotient:
    """``dividend // divisor``, rounded down; the divisor is at least 2."""

    dividend: Sum
    divisor: int

    def __str__(self) -> str:
        return f"({self.dividend})//{self.divisor}"

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Least and largest value, or numbers beyond them."""
        least, most = self.dividend.bounds
        return least // self.divisor, most // self.divisor


@dataclass(frozen=True)
class Remainder:
    """``dividend % divisor``, never negative; the divisor is at least 2."""

    dividend: Sum
    divisor: int

    def __str__(self) -> str:
        return f"({self.dividend})%{self.divisor}"

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Least and largest value, or numbers beyond them."""
        least, most = self.dividend.bounds
        if least // self.divisor == most // self.divisor:
            return least % self.divisor, most % self.divisor
        return 0, self.divisor - 1


Atom: TypeAlias = Symbol | Quotient | Remainder


@dataclass(frozen=True)
class Sum:
    """A constant and multiples of atoms, each atom once, in the order of their texts."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    def __str__(self) -> str:
        parts = [f"{'' if factor == 1 else f'{factor}*'}{atom}" for atom, factor in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -1*", "- ").replace("+ -", "- ")

    def __add__(self, other: Sum) -> Sum:
        return total((*self.terms, *other.terms), self.constant + other.constant)

    def __sub__(self, other: Sum) -> Sum:
        return self + other * -1

    def __mul__(self, factor: int) -> Sum:
        terms = ((atom, factor * each) for atom, each in self.terms)
        return total(terms, factor * self.constant)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Least and largest value, or numbers beyond them: atoms count as independent."""
        least = most = self.constant
        for atom, factor in self.terms:
            ends = [factor * each for each in atom.bounds]
            least, most = least + min(ends), most + max(ends)
        return least, most

    def value(self, values: Mapping[str, int]) -> int:
        """The number that it is where variables have these values."""
        return self.constant + sum(factor * _value(atom, values) for atom, factor in self.terms)


def _value(atom: Atom, values: Mapping[str, int]) -> int:
    if isinstance(atom, Symbol):
        return values[atom.name]
    dividend = atom.dividend.value(values)
    if isinstance(atom, Quotient):
        return dividend // atom.divisor
    return dividend % atom.divisor


def total(terms: Iterable[tuple[Atom, int]], number: int = 0) -> Sum:
    """The sum of multiples of atoms and a number."""
    factors: dict[Atom, int] = {}
    for atom, factor in terms:
        factors[atom] = factors.get(atom, 0) + factor
    left = [each for each in factors.items() if each[1]]
    return Sum(tuple(sorted(left, key=lambda each: str(each[0]))), number)


def constant(number: int) -> Sum:
    """A number."""
    return Sum((), number)


def variable(symbol: Symbol) -> Sum:
    """A variable; the number 0 if that is its only value."""
    return Sum(((symbol, 1),)) if symbol.extent > 1 else constant(0)


def quotient(dividend: Sum, divisor: int) -> Sum:
    """``dividend // divisor`` for a divisor of at least 1, in its simplest form."""
    least, most = dividend.bounds
    if least // divisor == most // divisor:
        return constant(least // divisor)
    whole = [(atom, each // divisor) for atom, each in dividend.terms if each % divisor == 0]
    rest = [(atom, each) for atom, each in dividend.terms if each % divisor]
    outside = total(whole, dividend.constant // divisor)
    inside = total(rest, dividend.constant % divisor)
    if not rest:
        return outside
    if whole or outside.constant:
        return outside + quotient(inside, divisor)
    common = gcd(divisor, *(each for _, each in rest))
    if common > 1:
        return quotient(_divided(inside, common), divisor // common)
    (atom, factor), *others = inside.terms
    if isinstance(atom, Quotient) and factor == 1 and not others and not inside.constant:
        return quotient(atom.dividend, atom.divisor * divisor)
    return Sum(((Quotient(inside, divisor), 1),))


def remainder(dividend: Sum, divisor: int) -> Sum:
    """``dividend % divisor`` for a divisor of at least 1, in its simplest form."""
    least, most = dividend.bounds
    if least // divisor == most // divisor:
        return dividend - constant(least // divisor * divisor)
    reduced = constant(dividend.constant % divisor)
    for atom, factor in dividend.terms:
        part = Sum(((atom, 1),))
        if isinstance(atom, Remainder) and atom.divisor % divisor == 0:
            part = atom.dividend
        reduced += part * (factor % divisor)
    if reduced != dividend:
        return remainder(reduced, divisor)
    common = gcd(divisor, *(factor for _, factor in reduced.terms))
    if common > 1:
        left = constant(reduced.constant % common)
        return left + remainder(_divided(reduced, common), divisor // common) * common
    return Sum(((Remainder(reduced, divisor), 1),))


def _divided(number: Sum, divisor: int) -> Sum:
    """A sum whose factors are divided by what divides them, and its constant rounded down."""
    terms = ((atom, each // divisor) for atom, each in number.terms)
    return total(terms, number.constant // divisor)
