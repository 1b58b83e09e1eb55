"""What the reductions and outputs of a group compute, as mathematics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.group import Member
from crossfuse.cascade.detect.loads import Load, loads_of, moved, same, variables_of
from crossfuse.cascade.detect.refusal import refused
from crossfuse.cascade.detect.symbols import Symbols
from crossfuse.cascade.expressions.to_sympy import narrows, to_sympy

#: Results that are rounded below these bits are what they are rounded to.
_KEPT_BITS = 16
#: Largest relative distance of a float32 constant from the fraction that it stands for.
_CLOSE = sympy.Rational(1, 2**22)


class Reading:
    """An expression of a block, read.

    Attributes
    ----------
    term : sympy.Expr
        Its value.
    cast : str
        The narrowest type that what depends on results is rounded to on the way; empty if none.
    """

    def __init__(
        self, symbols: Symbols, reader: Block, value: Any, binding: Mapping[Any, Any]
    ) -> None:
        self.symbols = symbols
        self.reader = reader
        known = symbols.values
        self.binding = {
            var: ir.substitute(image, lambda each: known.get(each, each))
            for var, image in binding.items()
        }
        self.cast = ""
        moved_value = ir.substitute(value, lambda var: self.binding.get(var, var))
        self.term = to_sympy(moved_value, self._leaf, self._rounded, self._whole)

    def _leaf(self, node: Any) -> sympy.Expr:
        if isinstance(node, ir.Var):
            return self.symbols.of_var(node)
        indices = moved(node.indices, {}, self.symbols.extents)
        member = self.symbols.group.member(node.source)
        if member is None:
            self._check_element(node, indices)
            return self.symbols.of_load(node, indices)
        return self._result(node, indices, member)

    def _result(self, node: Any, indices: tuple[Any, ...], member: Member) -> sympy.Expr:
        stage = self.symbols.stages[id(member.block)]
        due = access.replaced(member.loops, self.symbols.values, self.symbols.extents)
        found = access.simplified(indices[: len(due)], self.symbols.extents)
        if not same(due, found):
            where = f"{self.reader.where}, buffer '{node.source.name}'"
            what = f"a result read at another row: {Load(node.source, indices).text}"
            place = ", ".join(str(each) for each in due)
            raise refused(where, what, f"the result of its own row and column: [{place}]")
        if node.source.same_as(member.block.buffer):
            return stage.symbol
        return stage.index_symbol

    def _check_element(self, node: Any, indices: tuple[Any, ...]) -> None:
        """What a producer makes is read along the axis."""
        made = self.symbols.program.reduction(node.source)
        if made is not None and self.symbols.axis not in variables_of(indices):
            where = f"{self.reader.where}, buffer '{node.source.name}'"
            found = (
                f"one element of what block '{made.name}' makes: {Load(node.source, indices).text}"
            )
            limit = "elements that change along the axis"
            instead = "take it by a sum, such as of where(l == label[i], x[i, l], 0)"
            raise refused(where, found, limit, instead)

    def _rounded(self, dtype: str, value: sympy.Expr) -> sympy.Expr:
        if value.free_symbols & self._results() and (not self.cast or narrows(self.cast, dtype)):
            self.cast = dtype
        return value

    def _results(self) -> set[sympy.Symbol]:
        return {each.symbol for each in self.symbols.stages.values()}

    def _whole(self, node: Any) -> sympy.Expr | None:
        """Elements that are rounded to few bits before any result is used stay rounded."""
        if not isinstance(node, ir.tirx.Cast) or not narrows(str(node.value.ty), str(node.ty)):
            return None
        loads = loads_of(node)
        own = any(self.symbols.group.member(each.buffer) for each in loads)
        few = int(ir.tvm.DataType(str(node.ty)).bits) < _KEPT_BITS
        return self.symbols.of_whole(node) if few and loads and not own else None


def with_length(
    term: sympy.Expr, extent: int, sums: Iterable[sympy.Symbol], symbols: Symbols
) -> sympy.Expr:
    """A term in which sums are divided by the number of elements, not by a constant that equals it.

    A mean is of as many elements as there are; only then can it be told from a scaled sum.
    """
    known = set(sums)

    def is_mean(each: sympy.Basic) -> bool:
        number = each.args[0] if each.is_Mul else sympy.S.Zero
        close = number.is_Rational and abs(abs(number) * extent - 1) < _CLOSE
        return bool(close) and bool(known & set(each.args))

    def divided(each: sympy.Basic) -> sympy.Basic:
        number, *rest = each.args
        return sympy.sign(number) * sympy.Mul(*rest) / symbols.of_length(extent)

    def is_sum(part: sympy.Basic) -> bool:
        return part in known or -part in known

    def has_sum(each: sympy.Basic) -> bool:
        return bool(each.is_Add) and any(map(is_sum, each.args))

    def averaged(each: sympy.Basic) -> sympy.Basic:
        length = symbols.of_length(extent)
        return sympy.Add(*(part / length if is_sum(part) else part for part in each.args))

    # The sum of one element is its mean: nothing divides it, but distances from it tell.
    return term.replace(is_mean, divided) if extent > 1 else term.replace(has_sum, averaged)
