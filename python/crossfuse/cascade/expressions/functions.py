"""Functions of numbers that sympy lacks or names otherwise than TVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from crossfuse.errors import CascadeRefused, RefusedError, refuse


class _Whole(sympy.Function):
    """A function whose value is a whole number near its argument."""

    nargs = 1
    is_integer = True
    is_extended_real = True

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """Whole numbers stay as they are."""
        return x if x.is_integer else None


class rint(_Whole):  # named as in numpy, so that sympy's printer for numpy prints a call of it
    """The nearest whole number; of two that are equally near the even one."""


class trunc(_Whole):
    """The nearest whole number towards zero."""


class round_away(_Whole):
    """The nearest whole number; of two that are equally near the one farther from zero."""

    def _numpycode(self, printer: Any) -> str:
        x = printer._print(self.args[0])
        return f"(numpy.sign({x})*numpy.floor(numpy.abs({x}) + 0.5))"


class magnitude(sympy.Function):
    """An absolute value that is left as it is: sympy's own takes signs out of sums without end."""

    nargs = 1
    is_extended_nonnegative = True

    def _numpycode(self, printer: Any) -> str:
        return f"numpy.abs({printer._print(self.args[0])})"


class log1p(sympy.Function):  # named as in numpy and TVM
    """The logarithm of 1 + x, with all digits where x is near 0."""

    nargs = 1

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """The logarithm of 1 is 0."""
        return sympy.S.Zero if x.is_zero else None

    def _eval_is_real(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None


def sigmoid(x: sympy.Expr) -> sympy.Expr:
    """The logistic function, spelt out so that the algebra sees its parts."""
    return 1 / (1 + sympy.exp(-x))


#: Functions by the names of TVM's operators after the last dot.
OF_OPERATOR: dict[str, Callable[..., sympy.Expr]] = {
    "exp": sympy.exp,
    "exp2": lambda x: sympy.Pow(2, x),
    "exp10": lambda x: sympy.Pow(10, x),
    "log": sympy.log,
    "log2": lambda x: sympy.log(x) / sympy.log(2),
    "log10": lambda x: sympy.log(x) / sympy.log(10),
    "log1p": log1p,
    "sqrt": sympy.sqrt,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "pow": sympy.Pow,
    "fabs": sympy.Abs,
    "abs": sympy.Abs,
    "tanh": sympy.tanh,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "asinh": sympy.asinh,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "erf": sympy.erf,
    "sigmoid": sigmoid,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "trunc": trunc,
    "round": round_away,
    "nearbyint": rint,
}

#: Names of TVM's functions of one number, by the sympy function that each computes.
OF_FUNCTION: dict[type, str] = {
    sympy.exp: "exp",
    sympy.log: "log",
    log1p: "log1p",
    sympy.tanh: "tanh",
    sympy.sinh: "sinh",
    sympy.cosh: "cosh",
    sympy.asinh: "asinh",
    sympy.sin: "sin",
    sympy.cos: "cos",
    sympy.erf: "erf",
    sympy.floor: "floor",
    sympy.ceiling: "ceil",
    trunc: "trunc",
    round_away: "round",
    rint: "nearbyint",
}


def factored(expression: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Split a sum, such as an exponent, into a positive factor of all addends and the rest.

    Multiplied in, as sympy has it, the factor would be rounded with each of them: of ``3*x - 3*m``
    as three times the difference, large numbers that lie close together give an exact one. The
    factor is 1 for what is no sum, and where addends have several.
    """
    addends = sympy.Add.make_args(expression)
    factors = {abs(each.as_coeff_Mul()[0]) for each in addends}
    if len(addends) == 1 or len(factors) != 1:
        return sympy.S.One, expression
    (factor,) = factors
    return factor, sympy.Add(*(each / factor for each in addends))


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of an expression; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-expression", where, found=found, limit=limit, instead=instead
    )
