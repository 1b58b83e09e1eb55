"""Writes expressions as plain text, in the order in which people write them."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE, precedence
from sympy.printing.str import StrPrinter

from crossfuse.cascade.expressions.functions import UNBOUNDED, Compared, Fence, magnitude

#: Fractions with a larger denominator are written as decimals.
_LONGEST = 1000


def written(expression: sympy.Basic) -> str:
    """An expression as text, such as ``"s·exp(m - m~)"``; choices as ``"x if l ≤ i else -∞"``."""
    return str(_Printer().doprint(expression))


def _unguarded(choice: sympy.Piecewise) -> sympy.Expr | None:
    """What a choice is where all is in range; None if that is not what it asks.

    It is the other side of ``t if |t| = oo else ...``, and t of ``t if t >= 0 else oo - ...``.
    """
    (first, test), (other, _) = choice.args[0], choice.args[-1]
    if len(choice.args) > 2:
        return None
    if isinstance(test, sympy.Ge) and other.has(UNBOUNDED):
        return first if test.args == (Compared(first), sympy.S.Zero) else None
    infinite = isinstance(test, sympy.Eq) and test.args == (magnitude(first), sympy.oo)
    return other if infinite else None


class _Printer(StrPrinter):
    """Positive addends first; multiplication by dots."""

    def _print_Add(self, expr: Any, order: Any = None) -> str:
        parts = sorted(expr.args, key=lambda each: each.could_extract_minus_sign())
        text = ""
        for each in parts:
            minus = each.could_extract_minus_sign() and not each.is_Add
            shown = -each if minus else each
            inner = minus and isinstance(shown, Fence)
            part = f"({self._print(shown)})" if inner else self._print_addend(shown)
            if not text:
                text = f"-{part}" if minus else part
            else:
                text += f" - {part}" if minus else f" + {part}"
        return text

    def _print_addend(self, expr: Any) -> str:
        return str(self.parenthesize(expr, PRECEDENCE["Add"]))

    def _print_Fence(self, expr: Any) -> str:
        return str(self._print(expr.args[0]))

    _print_Compared = _print_Fence

    def _print_Mul(self, expr: Any) -> str:
        number = expr.as_coeff_Mul()[0]
        if number.is_negative:
            return "-" + self.parenthesize(-expr, PRECEDENCE["Add"])
        above, below = [], []
        for each in sympy.Mul.make_args(expr):
            base, power = each.as_base_exp()
            if each.is_Rational and each.q > _LONGEST:
                above.append(each)
            elif each.is_Rational:
                above += [sympy.Integer(each.p)] if each.p != 1 else []
                below += [sympy.Integer(each.q)] if each.q != 1 else []
            elif each.is_Pow and power.could_extract_minus_sign():
                below.append(sympy.Pow(base, -power))
            else:
                above.append(each)
        top = "·".join(self.parenthesize(each, PRECEDENCE["Mul"]) for each in above) or "1"
        bottom = "·".join(self.parenthesize(each, PRECEDENCE["Mul"]) for each in below)
        if not below:
            return top
        return f"{top}/({bottom})" if len(below) > 1 else f"{top}/{bottom}"

    def _print_Rational(self, expr: Any) -> str:
        if expr.q > _LONGEST:
            return f"{float(expr):.7g}"
        return str(super()._print_Rational(expr))

    def _print_Pow(self, expr: Any, rational: bool = False) -> str:
        base, power = expr.args
        if power == sympy.Rational(1, 2):
            return f"sqrt({self._print(base)})"
        if power.could_extract_minus_sign():
            return "1/" + self.parenthesize(sympy.Pow(base, -power), PRECEDENCE["Mul"])
        under = self.parenthesize(base, PRECEDENCE["Pow"])
        return f"{under}^{self.parenthesize(power, PRECEDENCE['Pow'])}"

    def _print_UnevaluatedExpr(self, expr: Any) -> str:
        return str(self._print(expr.args[0]))

    def _print_Abs(self, expr: Any) -> str:
        return f"|{self._print(expr.args[0])}|"

    _print_magnitude = _print_Abs

    def _print_Max(self, expr: Any) -> str:
        return f"max({self._listed(expr)})"

    def _print_Min(self, expr: Any) -> str:
        return f"min({self._listed(expr)})"

    def _listed(self, expr: Any) -> str:
        return ", ".join(sorted(self._print(each) for each in expr.args))

    def _print_Piecewise(self, expr: Any) -> str:
        inner = _unguarded(expr)
        if inner is not None:
            return str(self._print(inner))
        text = ""
        for value, test in expr.args:
            shown = self._print(value)
            text += shown if test == sympy.true else f"{shown} if {self._print(test)} else "
        return f"({text})"

    def _print_Relational(self, expr: Any) -> str:
        sign = {">=": "≥", "<=": "≤", "==": "=", "!=": "≠"}.get(expr.rel_op, expr.rel_op)
        one, other = (self.parenthesize(each, precedence(expr)) for each in expr.args)
        return f"{one} {sign} {other}"

    def _print_Infinity(self, expr: Any) -> str:
        return "∞"

    def _print_NegativeInfinity(self, expr: Any) -> str:
        return "-∞"

    def _print_Symbol(self, expr: Any) -> str:
        return str(expr.name)

    _print_Dummy = _print_Symbol
