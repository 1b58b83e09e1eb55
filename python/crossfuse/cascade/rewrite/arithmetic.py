"""Expressions of a derivation as expressions of TVM, exponentials to the base of two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.to_tir import to_tir
from crossfuse.cascade.monoid import Monoid
from crossfuse.cascade.rewrite.phases import Definition, Shared
from crossfuse.cascade.rewrite.scripting import Scratch

_LOG2E = 1 / math.log(2)


def written(expression: sympy.Expr, values: Mapping[sympy.Symbol, Any], dtype: str) -> Any:
    """An expression in TVM's terms; ``exp(x)`` is ``exp2(x * log2(e))``.

    The hardware has no other exponential. The factor comes behind the difference in the exponent,
    not before it: of large numbers that lie close together the difference is exact.
    """

    def change(call: Any, mutator: Any) -> Any:
        call = mutator.default_mutate(call)
        if not isinstance(call.op, ir.Op) or call.op.name != "tirx.exp":
            return call
        (power,) = call.args
        return ir.tirx.exp2(power * ir.tirx.const(_LOG2E, str(power.ty)))

    return ir.mutate(to_tir(expression, values, dtype), (ir.Call, change))


def combined(monoid: Monoid, left: Any, right: Any, dtype: str) -> Any:
    """Two numbers under a monoid."""
    a, b = sympy.symbols("a b", real=True)
    return written(monoid.combine(a, b), {a: left, b: right}, dtype)


class Definitions:
    """Values of symbols, to which what is computed on the way is added.

    Parameters
    ----------
    values : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What symbols stand for.
    dtype : str
        Type of the arithmetic.
    """

    def __init__(self, values: Mapping[sympy.Symbol, Any], dtype: str) -> None:
        self.values = dict(values)
        self.dtype = dtype
        #: Of slots that keep several numbers: these.
        self.chosen: dict[str, list[Any]] = {}

    def write(self, expression: sympy.Expr, dtype: str = "") -> Any:
        """An expression over the values so far, in the type of the arithmetic or another."""
        return written(expression, self.values, dtype or self.dtype)

    def define(self, definitions: Sequence[Definition]) -> None:
        """Statements: compute and name."""
        for symbol, each in definitions:
            self.values[symbol] = Scratch(f"{symbol.name}_", self.dtype, self.write(each)).value

    def all(self, parts: Shared) -> list[Any]:
        """The expressions of parts whose fixed part is defined already."""
        self.define(parts.definitions)
        return [self.write(each) for each in parts.expressions]
