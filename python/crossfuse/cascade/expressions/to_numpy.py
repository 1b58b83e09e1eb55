"""Compiles expressions to functions of numpy arrays, true infinities included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE

from crossfuse.cascade.expressions.functions import fraction


def function(symbols: Sequence[sympy.Symbol], expression: sympy.Expr) -> Callable[..., Any]:
    """Compile an expression to a function of arrays, which are broadcast against each other.

    The symbols are its arguments, in order. Constants take the arrays' type; all sides of choices
    are computed.
    """
    return _made(tuple(symbols), expression)


@lru_cache(maxsize=4096)
def _made(symbols: tuple[sympy.Symbol, ...], expression: sympy.Expr) -> Callable[..., Any]:
    # Plain names: symbols may be spelt like "m'", or alike with other assumptions. They may be
    # infinite too, so that sympy decides nothing about comparisons with infinities.
    names = [sympy.Symbol(f"argument_{i}", extended_real=True) for i, _ in enumerate(symbols)]
    renamed = expression.xreplace(dict(zip(symbols, names, strict=True)))
    unknown = renamed.free_symbols - set(names)
    if unknown:
        raise ValueError(f"no value for {', '.join(sorted(map(str, unknown)))} in {expression}")
    known = [{"error_function": _erf}, "numpy"]
    made: Callable[..., Any] = sympy.lambdify(names, renamed, modules=known, printer=_printer())
    return made


def _erf(x: Any) -> Any:
    """The error function, which numpy lacks."""
    import math

    import numpy as np

    return np.vectorize(math.erf, otypes=[float])(x)


@lru_cache(maxsize=1)
def _printer() -> Any:
    from sympy.printing.numpy import NumPyPrinter

    class Printer(NumPyPrinter):
        """Prints maxima and conditions of arrays in pairs, and numbers of any size."""

        def _pairs(self, name: str, expr: Any) -> str:
            *rest, last = expr.args
            found = self._print(last)
            for each in rest:
                found = f"numpy.{name}({self._print(each)}, {found})"
            return found

        def _print_Integer(self, expr: Any) -> str:
            # Of integers beyond its own numpy makes arrays of objects; the least float32 is one.
            return repr(float(expr)) if abs(expr) >= 2**63 else str(int(expr))

        def _print_erf(self, expr: Any) -> str:
            return f"error_function({self._print(expr.args[0])})"

        def _print_Mul(self, expr: Any) -> str:
            _, below = fraction(expr)
            again = [each for each in below if below.count(each) > 1]
            if not again:
                return str(super()._print_Mul(expr))
            found = self.parenthesize(expr * sympy.Mul(*again), PRECEDENCE["Mul"])
            return str(found) + "".join(f"/({self._print(each)})" for each in again)

        def _print_Piecewise(self, expr: Any) -> str:
            # Conditions as they are: sympy's own printer simplifies them, as if all were finite.
            found = "numpy.nan"
            for value, test in reversed(expr.args):
                made = self._print(value)
                always = test == sympy.true
                found = made if always else f"numpy.where({self._print(test)}, {made}, {found})"
            return found

        def _print_And(self, expr: Any) -> str:
            return self._pairs("logical_and", expr)

        def _print_Or(self, expr: Any) -> str:
            return self._pairs("logical_or", expr)

        def _print_Max(self, expr: Any) -> str:
            return self._pairs("maximum", expr)

        def _print_Min(self, expr: Any) -> str:
            return self._pairs("minimum", expr)

    return Printer(
        {"fully_qualified_modules": True, "inline": True, "allow_unknown_functions": True}
    )
