"""What a reduction combines elements with."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

#: Reductions whose state is one number.
SCALAR = ("sum", "prod", "max", "min", "logaddexp")
#: Reductions whose state is a number and where it stood.
INDEXED = ("argmax", "argmin")
#: Reductions whose state is the k largest numbers and where they stood.
RANKED = ("topk",)


@dataclass(frozen=True)
class Monoid:
    """A reduction operator: associative, commutative, with an identity.

    Attributes
    ----------
    name : str
        One of `SCALAR`, `INDEXED` and `RANKED`.
    k : int
        How many numbers ``topk`` keeps, in descending order; 0 for others. Of equal numbers that of
        the lower index comes first.
    """

    name: str
    k: int = 0

    @property
    def identity(self) -> sympy.Expr:
        """What changes nothing: 0, 1 or an infinity."""
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

    def combine(self, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
        """Two scalar states as one expression.

        Parameters
        ----------
        left, right : sympy.Expr
            States of a reduction of `SCALAR`.

        Returns
        -------
        sympy.Expr
            Such as ``left + right``.

        Raises
        ------
        ValueError
            For a state that is more than one number.
        """
        if self.name == "sum":
            return left + right
        if self.name == "prod":
            return left * right
        if self.name == "max":
            return sympy.Max(left, right)
        if self.name == "min":
            return sympy.Min(left, right)
        if self.name == "logaddexp":
            return sympy.log(sympy.exp(left) + sympy.exp(right))
        raise ValueError(f"{self.name} combines more than one number")


SUM = Monoid("sum")
PROD = Monoid("prod")
MAX = Monoid("max")
MIN = Monoid("min")
LOGADDEXP = Monoid("logaddexp")
ARGMAX = Monoid("argmax")
ARGMIN = Monoid("argmin")


def topk(k: int) -> Monoid:
    """The reduction that keeps the `k` largest."""
    return Monoid("topk", k)
