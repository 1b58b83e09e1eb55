"""What the symbols of an expression stand for, and which expressions are whole numbers of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse.cascade.expressions.functions import trunc
from crossfuse.cascade.expressions.refusal import refused


@dataclass(frozen=True)
class Values:
    """Expressions of TVM by their symbols.

    Attributes
    ----------
    symbols : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What each stands for, of whatever type.
    """

    symbols: Mapping[sympy.Symbol, Any]

    def value(self, symbol: sympy.Symbol) -> Any:
        """What a symbol stands for; refused is one without a value."""
        if symbol not in self.symbols:
            known = ", ".join(sorted(each.name for each in self.symbols)) or "none"
            limit, instead = f"symbols with a value: {known}", "pass its value"
            raise refused(f"symbol {symbol}", "no value", limit, instead)
        return self.symbols[symbol]

    def is_whole(self, expression: sympy.Basic) -> bool:
        """Whether an expression is made of integers only, by operators that keep them so."""
        if isinstance(expression, sympy.Symbol):
            kind = type_of(self.value(expression))
            return "int" in kind or kind == "bool"
        if isinstance(expression, sympy.Integer):
            return True
        if isinstance(expression, sympy.floor | trunc):
            return all(self.is_whole(each) for each in expression.args[0].as_numer_denom())
        kept = sympy.Add | sympy.Mul | sympy.Mod | sympy.Max | sympy.Min | sympy.Abs
        return isinstance(expression, kept) and all(self.is_whole(each) for each in expression.args)

    def index_type(self, *expressions: sympy.Basic) -> str:
        """The integer type that holds all integers of expressions."""
        symbols = {each for one in expressions for each in one.free_symbols}
        wide = any(type_of(self.value(each)) in ("int64", "uint64", "uint32") for each in symbols)
        return "int64" if wide else "int32"


def type_of(value: Any) -> str:
    """The element type of an expression of TVM."""
    return str(value.ty)
