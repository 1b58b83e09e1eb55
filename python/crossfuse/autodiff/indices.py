"""Indices of loads as quasi-affine expressions, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.inverse import Condition
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
