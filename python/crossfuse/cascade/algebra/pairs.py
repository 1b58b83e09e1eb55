"""Pairs of operators: what distributes over what, and why."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.cascade.monoid import Monoid


@dataclass(frozen=True)
class Pair:
    """An operator that comes out of a reduction.

    Attributes
    ----------
    reduction : str
        Name of the monoid.
    operator : str
        ``"+"``, ``"*"`` or ``"increasing"``.
    law : str
        What makes it so.
    condition : str
        What must be proved of the operand; empty if nothing.
    """

    reduction: str
    operator: str
    law: str
    condition: str = ""

    @property
    def text(self) -> str:
        """How steps name it."""
        return f"{self.reduction}, {self.operator}"


#: All that is used.
PAIRS = (
    Pair("sum", "*", "a*c + b*c = (a + b)*c"),
    Pair("max", "+", "max(a + c, b + c) = max(a, b) + c"),
    Pair("min", "+", "min(a + c, b + c) = min(a, b) + c"),
    Pair("topk", "+", "the k largest of a + c are the k largest of a, plus c"),
    Pair("argmax", "+", "where a + c is largest, a is"),
    Pair("argmin", "+", "where a + c is least, a is"),
    Pair("max", "*", "max(a*c, b*c) = max(a, b)*c", "c >= 0"),
    Pair("min", "*", "min(a*c, b*c) = min(a, b)*c", "c >= 0"),
    Pair("topk", "*", "the k largest of a*c are the k largest of a, times c", "c >= 0"),
    Pair("argmax", "*", "where a*c is largest, a is", "c >= 0"),
    Pair("argmin", "*", "where a*c is least, a is", "c >= 0"),
    Pair("logaddexp", "+", "log(exp(a + c) + exp(b + c)) = log(exp(a) + exp(b)) + c"),
    Pair("prod", "*", "prod(a*c) over n elements = prod(a) * c**n"),
)


def pair_of(monoid: Monoid, added: bool) -> str:
    """The name of a pair: the operator is an addition, or a multiplication by what is >= 0."""
    operator = "+" if added else "*"
    found = next(p for p in PAIRS if (p.reduction, p.operator) == (monoid.name, operator))
    return found.text + (f" ({found.condition})" if found.condition else "")
