"""Converts expressions of TVM to sympy: real numbers, without types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import (
    OF_OPERATOR,
    UNBOUNDED,
    Compared,
    fenced_product,
    fenced_sum,
    refused,
    settled,
    trunc,
    with_flags,
)

#: From a load or a variable to its value.
Leaf = Callable[[Any], sympy.Expr]
#: From a type and a value that is rounded to it to the rounded value.
Rounded = Callable[[str, sympy.Expr], sympy.Expr]
#: From a part to its value, if it is not to be taken apart; None for all others.
Whole = Callable[[Any], "sympy.Expr | None"]


def to_sympy(
    expression: Any, leaf: Leaf, rounded: Rounded | None = None, whole: Whole | None = None
) -> sympy.Basic:
    """Convert an expression of TVM to mathematics: a Boolean for a condition, else an Expr.

    Conversions between types are dropped, but that of a number to an integer, which cuts it off.
    Additions stay in their order; see `crossfuse.cascade.expressions.functions`. A condition that
    is used as a number is 1 or 0; of a load or variable of type bool, `leaf` gives a number that is
    not 0 where it holds. `rounded` is called for each conversion to a floating-point type with
    fewer digits or range, `whole` for each part before what is below it. Operators without a
    counterpart, and NaN, are refused.
    """
    return settled(_Reader(leaf, rounded, whole).read(expression))


def number(immediate: Any) -> sympy.Expr:
    """The number that a constant of TVM stands for.

    It is the shortest decimal that the type rounds to the constant: 1e-5, not 9.99999974737875e-06.
    """
    if isinstance(immediate, ir.tirx.IntImm):
        return sympy.Integer(int(immediate.value))
    value = float(immediate.value)
    if np.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    if np.isnan(value):
        limit, instead = "numbers and infinities", "mask with -inf, or with 0 in the term"
        raise refused("constant", "nan", limit, instead)
    shortest = repr(value) if str(immediate.ty) == "float64" else str(np.float32(value))
    return sympy.Rational(shortest)


class _Reader:
    def __init__(self, leaf: Leaf, rounded: Rounded | None, whole: Whole | None) -> None:
        self.leaf = leaf
        self.rounded = rounded
        self.whole = whole

    def read(self, node: Any) -> sympy.Basic:
        """Convert a value by its type: to a condition or a number."""
        known = self.whole(node) if self.whole is not None else None
        if known is not None:
            return sympy.Ne(Compared(known), 0) if _is_condition(node) else known
        if isinstance(node, ir.tirx.IntImm) and _is_condition(node):
            return sympy.true if int(node.value) else sympy.false
        if isinstance(node, ir.tirx.IntImm | ir.tirx.FloatImm):
            return number(node)
        if isinstance(node, ir.TensorLoad | ir.Var):
            value = self.leaf(node)
            return sympy.Ne(value, 0) if _is_condition(node) else value
        if isinstance(node, ir.tirx.Cast):
            return self.cast(node)
        if isinstance(node, ir.tirx.Select):
            return self.choice(node.condition, node.true_value, node.false_value)
        if isinstance(node, ir.Call):
            return self.call(node)
        rule = _NUMBERS.get(type(node))
        if "int" in str(node.ty):
            rule = _WHOLE.get(type(node), rule)
        if rule is not None:
            if str(node.ty) in _WRAPPING and rule not in (sympy.Max, sympy.Min):
                limit, instead = "numbers that do not wrap around", "convert the operands before"
                raise refused(f"arithmetic in {node.ty}", node, limit, instead)
            return rule(self.number(node.a), self.number(node.b))
        if isinstance(node, ir.tirx.Div):
            return self.division(node)
        compared = _COMPARISONS.get(type(node))
        if compared is not None:
            return self.comparison(compared, node)
        logical = _CONDITIONS.get(type(node)) if _is_condition(node) else None
        if logical is not None:
            return logical(*(self.condition(each) for each in _operands(node)))
        raise _unknown(type(node).__name__, node)

    def number(self, node: Any) -> sympy.Expr:
        found = self.read(node)
        return sympy.Piecewise((1, found), (0, True)) if _is_condition(node) else found

    def condition(self, node: Any) -> sympy.Basic:
        """Convert a value to a condition."""
        found = self.read(node)
        return found if _is_condition(node) else sympy.Ne(Compared(found), 0)

    def cast(self, node: Any) -> sympy.Basic:
        source, target = str(node.value.ty), str(node.ty)
        if target == "bool":
            return self.condition(node.value)
        value = self.number(node.value)
        if "int" in target and "float" in source:
            return trunc(value)
        if self.rounded is not None and narrows(source, target):
            return self.rounded(target, value)
        return value

    def choice(self, condition: Any, chosen: Any, otherwise: Any) -> sympy.Basic:
        test = self.condition(condition)
        if _is_condition(chosen):
            return _either(test, self.condition(chosen), self.condition(otherwise))
        return _choice(self.number(chosen), test, self.number(otherwise))

    def call(self, node: Any) -> sympy.Basic:
        full = str(getattr(node.op, "name", node.op))
        name = full.rpartition(".")[2]
        if full == ir.IF_THEN_ELSE:
            return self.choice(*node.args)
        if name not in OF_OPERATOR:
            raise _unknown(full, node)
        return OF_OPERATOR[name](*(self.number(each) for each in node.args))

    def division(self, node: Any) -> sympy.Expr:
        left, right = self.number(node.a), self.number(node.b)
        if "int" not in str(node.ty):
            return _product(left, 1 / right)
        whole = left.is_nonnegative and right.is_positive
        return sympy.floor(left / right) if whole else trunc(left / right)

    def comparison(self, compared: Callable[..., sympy.Basic], node: Any) -> sympy.Basic:
        if _is_condition(node.a):
            one, other = self.condition(node.a), self.condition(node.b)
            alike = _either(one, other, sympy.Not(other))
            return sympy.Not(alike) if compared is sympy.Ne else alike
        sides = (self.number(node.a), self.number(node.b))
        strict = compared in (sympy.StrictLessThan, sympy.StrictGreaterThan)  # false of NaN too
        if sides[0] == sides[1] and not (strict or sides[0].is_integer):
            limit, instead = "comparisons of two values", "compute it in a block of its own before"
            raise refused("a test for NaN", node, limit, f"{instead} the cascade")
        return compared(*(Compared(each.xreplace(_INFINITIES)) for each in sides))


#: Types whose sums and products leave them, and are not what they are in more bits.
_WRAPPING = ("int8", "uint8", "int16", "uint16")
_INFINITIES = {sympy.oo: UNBOUNDED, -sympy.oo: -UNBOUNDED}


def narrows(source: str, target: str) -> bool:
    """Whether a conversion between floating-point types loses digits or range."""
    if "float" not in source or "float" not in target:
        return False
    one, other = _digits_and_range(source), _digits_and_range(target)
    return other[0] < one[0] or other[1] < one[1]


def largest(dtype: str) -> float:
    """The largest finite number of a floating-point type."""
    return _digits_and_range(dtype)[1]


@functools.lru_cache(maxsize=32)
def _digits_and_range(dtype: str) -> tuple[int, float]:
    import ml_dtypes

    known = getattr(ml_dtypes, dtype, dtype)
    found = ml_dtypes.finfo(known)
    return int(found.nmant), float(found.max)


@functools.lru_cache(maxsize=4096, typed=True)
def _choice(chosen: sympy.Expr, test: sympy.Basic, otherwise: sympy.Expr) -> sympy.Expr:
    """A choice by a condition, cached because sympy solves the condition for it.

    What is left out stands last, so that masks by a flag and by its opposite are one.
    """
    if chosen == sympy.S.NegativeInfinity != otherwise and _has_opposite(test):
        chosen, test, otherwise = otherwise, sympy.Not(test), chosen
    return sympy.Piecewise((chosen, test), (otherwise, True))


def _has_opposite(test: sympy.Basic) -> bool:
    """Whether a condition holds where its opposite does not: sympy's of ``x < 1`` fails for NaN."""
    orders = test.atoms(sympy.Rel) - test.atoms(sympy.Eq, sympy.Ne)
    return all(side.is_integer for order in orders for side in order.args)


def _either(test: sympy.Basic, chosen: sympy.Basic, otherwise: sympy.Basic) -> sympy.Basic:
    return sympy.Or(sympy.And(test, chosen), sympy.And(sympy.Not(test), otherwise))


def _product(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """A product without infinite constants, of which sympy does not know that 0 makes NaN."""
    if left.is_infinite or right.is_infinite:
        other = right if left.is_infinite else left
        if other.is_number and other.is_nonzero and other.is_finite:
            return left * right
        limit, instead = "finite factors", "mask with a choice; of one element torch divides by 0"
        raise refused("an infinite factor", f"oo * ({other})", limit, instead)
    whole = left.is_integer and right.is_integer
    if left.free_symbols and right.free_symbols and not whole:
        # Of what may be infinite a condition makes NaN, where a choice would hide it.
        left, right = with_flags(left), with_flags(right)
    return fenced_product(left, right)


def _operands(node: Any) -> tuple[Any, ...]:
    return (node.a,) if isinstance(node, ir.tirx.Not | ir.tirx.BitwiseNot) else (node.a, node.b)


def _is_condition(node: Any) -> bool:
    return str(node.ty) == "bool"


def _unknown(name: str, node: Any) -> Exception:
    limit = "arithmetic, comparisons, choices and " + ", ".join(sorted(OF_OPERATOR))
    instead = "spell it out by these, or compute it in a block of its own before the cascade"
    return refused(f"operator {name}", node, limit, instead)


_NUMBERS: dict[type, Callable[..., sympy.Expr]] = {
    ir.tirx.Add: fenced_sum,
    ir.tirx.Sub: lambda a, b: fenced_sum(a, fenced_product(sympy.S.NegativeOne, b)),
    ir.tirx.Mul: _product,
    ir.tirx.Max: sympy.Max,
    ir.tirx.Min: sympy.Min,
    ir.tirx.FloorDiv: lambda a, b: sympy.floor(a / b),
    ir.tirx.FloorMod: sympy.Mod,
}
#: Sums and products of integers, which are exact in any order.
_WHOLE: dict[type, Callable[..., sympy.Expr]] = {
    ir.tirx.Add: lambda a, b: a + b,
    ir.tirx.Sub: lambda a, b: a - b,
    ir.tirx.Mul: lambda a, b: a * b,
}
_COMPARISONS: dict[type, Callable[..., sympy.Basic]] = {
    ir.tirx.EQ: sympy.Eq,
    ir.tirx.NE: sympy.Ne,
    ir.tirx.LT: sympy.StrictLessThan,
    ir.tirx.LE: sympy.LessThan,
    ir.tirx.GT: sympy.StrictGreaterThan,
    ir.tirx.GE: sympy.GreaterThan,
}
_CONDITIONS: dict[type, Callable[..., sympy.Basic]] = {
    ir.tirx.And: sympy.And,
    ir.tirx.Or: sympy.Or,
    ir.tirx.Not: sympy.Not,
    ir.tirx.BitwiseAnd: sympy.And,
    ir.tirx.BitwiseOr: sympy.Or,
    ir.tirx.BitwiseNot: sympy.Not,
    ir.tirx.BitwiseXor: lambda a, b: _either(a, sympy.Not(b), b),
}
