"""Reads the blocks of a group as mathematics: terms over symbols, and what each symbol reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.group import Group, Member
from crossfuse.cascade.detect.loads import (
    Load,
    loads_of,
    mentions,
    moved,
    refused,
    same,
    variables_of,
)
from crossfuse.cascade.detect.program import Program
from crossfuse.cascade.expressions.tir import narrows, to_sympy
from crossfuse.cascade.spec import Stage
from crossfuse.workload.dtypes import loses


class Symbols:
    """The symbols of a group, with what each reads.

    `values` holds the site's expressions for variables of the group that the site does not have;
    `axis` and `extents` are the site's reduced loop and its loops.
    """

    def __init__(
        self,
        program: Program,
        group: Group,
        values: Mapping[Any, Any],
        axis: Any,
        extents: Mapping[Any, int],
    ) -> None:
        self.program = program
        self.group = group
        self.values = values
        self.axis = axis
        self.extents = extents
        self.reads: dict[sympy.Symbol, Any] = {}
        self.producers: dict[sympy.Symbol, str] = {}
        self.stages: dict[int, Stage] = {}
        self.length: sympy.Symbol | None = None
        self.index: sympy.Symbol | None = None
        self._taken: set[str] = set()
        self._loads: list[tuple[Load, sympy.Symbol]] = []
        self._vars: dict[Any, sympy.Symbol] = {}
        self._wholes: list[tuple[Any, sympy.Symbol]] = []

    def name(self, wanted: str) -> str:
        """Take a name that is free, as is that of its place."""
        wanted = re.sub(r"\W", "_", wanted)
        number, found = 0, wanted
        while {found, f"{found}_index"} & self._taken or found.endswith(("_a", "_b")):
            number += 1
            found = f"{wanted}{number}"
        self._taken |= {found, f"{found}_index"}
        return found

    @property
    def elements(self) -> tuple[sympy.Symbol, ...]:
        """Symbols that change along the axis."""
        return tuple(each for each in self.reads if mentions([self.reads[each]], self.axis))

    @property
    def invariants(self) -> tuple[sympy.Symbol, ...]:
        """Symbols that do not change along the axis."""
        return tuple(each for each in self.reads if not mentions([self.reads[each]], self.axis))

    def firsts(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """Symbols of the first of a row's elements, of numbers that are loaded as they are."""
        return {
            each: sympy.Symbol(self.name(f"{each.name}_first"), real=True)
            for each in self.elements
            if not each.is_integer and self._has_first(self.reads[each])
        }

    def _has_first(self, read: Any) -> bool:
        """Whether a load at the beginning of the axis lies within its tensor, whatever the axis."""
        if not isinstance(read, ir.TensorLoad):
            return False
        along = [each for each in read.indices if mentions([each], self.axis)]
        parts = (ir.tirx.FloorDiv, ir.tirx.FloorMod)
        return all(
            each.same_as(self.axis) or (isinstance(each, parts) and each.a.same_as(self.axis))
            for each in along
        )

    def of_load(self, load: Any, indices: tuple[Any, ...]) -> sympy.Symbol:
        """The symbol of an input or of a producer's result, at indices of the site."""
        for known, symbol in self._loads:
            if known.buffer.same_as(load.source) and same(known.indices, indices):
                return symbol
        never_below = load.source in self.program.nonnegative
        symbol = self._symbol(str(load.source.name), str(load.ty), never_below)
        self._loads.append((Load(load.source, indices), symbol))
        self.reads[symbol] = ir.tirx.BufferLoad(load.source, list(indices))
        made = self.program.reduction(load.source)
        if made is not None:
            self.producers[symbol] = made.name
        return symbol

    def of_var(self, var: Any) -> sympy.Symbol:
        """The symbol of a loop, or of a parameter that is a number."""
        if var not in self._vars:
            dtype, loop = str(var.ty), var in self.extents
            symbol = self._symbol(str(var.name), dtype, nonnegative=loop)
            self._vars[var] = symbol
            self.reads[symbol] = var
            if var.same_as(self.axis):
                self.index = symbol
        return self._vars[var]

    def of_whole(self, value: Any) -> sympy.Symbol:
        """The symbol of an element that is rounded before it is used."""
        for known, symbol in self._wholes:
            if ir.tvm_ffi.structural_equal(known, value):
                return symbol
        loads = loads_of(value)
        symbol = self._symbol(f"{loads[0].buffer.name}_rounded", str(value.ty))
        self._wholes.append((value, symbol))
        self.reads[symbol] = value
        made = [self.program.reduction(each.buffer) for each in loads]
        names = {each.name for each in made if each is not None}
        if names:
            self.producers[symbol] = ", ".join(sorted(names))
        return symbol

    def of_length(self, extent: int) -> sympy.Symbol:
        """The symbol of the number of elements."""
        if self.length is None:
            self.length = sympy.Symbol(self.name("N"), integer=True, positive=True)
            self.reads[self.length] = ir.tirx.const(extent, "int32")
        return self.length

    def _symbol(self, name: str, dtype: str, nonnegative: bool = False) -> sympy.Symbol:
        known = {"real": True} if "float" in dtype else {"integer": True}
        if nonnegative or dtype == "bool" or dtype.startswith("uint"):
            known["nonnegative"] = True
        return sympy.Symbol(self.name(name), **known)


#: Elements that are rounded to fewer bits are symbols of their own.
_KEPT_BITS = 16
#: Largest relative distance of a float32 constant from the fraction that it stands for.
_CLOSE = sympy.Rational(1, 2**22)


class Reading:
    """Reads the value of a block: its `term`, and the type that it is rounded to on the way."""

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
        #: The narrowest type that anything that depends on results is rounded to; empty if none.
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
        """Refuse a producer's result that is not read along the axis."""
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
        """The symbol of elements whose rounding is kept, before any result is used."""
        if not isinstance(node, ir.tirx.Cast) or not narrows(str(node.value.ty), str(node.ty)):
            return None
        loads = loads_of(node)
        own = any(self.symbols.group.member(each.buffer) for each in loads)
        kept = is_kept(str(node.ty), self.symbols.program)
        return self.symbols.of_whole(node) if kept and loads and not own else None


def is_kept(dtype: str, program: Program) -> bool:
    """Whether numbers that are rounded to a type have to be rounded in a kernel too."""
    few = int(ir.tvm.DataType(dtype).bits) < _KEPT_BITS
    return few or loses(dtype, program.types)


def with_length(
    term: sympy.Expr, extent: int, sums: Iterable[sympy.Symbol], symbols: Symbols
) -> sympy.Expr:
    """Divide sums by the symbol of the number of elements, not by a constant that equals it.

    A mean is of as many elements as there are; only then can it be told from a scaled sum.
    """
    known = set(sums)

    def divides(each: sympy.Basic) -> int:
        """How often the extent divides a product of sums: a square of a mean has it twice."""
        if not each.is_Mul or not each.args[0].is_Rational:
            return 0
        powers = [part.as_base_exp()[1] for part in each.args if part.as_base_exp()[0] in known]
        whole = int(sum(powers)) if all(power.is_Integer for power in powers) else 0
        for times in ((1,) if known & set(each.args) else ()) + (whole,):
            apart = abs(each.args[0]) * sympy.Integer(extent) ** times
            if times and abs(apart - 1) < _CLOSE:
                return times
        return 0

    def divided(each: sympy.Basic) -> sympy.Basic:
        number, *rest = each.args
        return sympy.sign(number) * sympy.Mul(*rest) / symbols.of_length(extent) ** divides(each)

    def is_sum(part: sympy.Basic) -> bool:
        return part in known or -part in known

    def has_sum(each: sympy.Basic) -> bool:
        return bool(each.is_Add) and any(map(is_sum, each.args))

    def averaged(each: sympy.Basic) -> sympy.Basic:
        length = symbols.of_length(extent)
        return sympy.Add(*(part / length if is_sum(part) else part for part in each.args))

    # The sum of one element is its mean: nothing divides it, but distances from it tell.
    return term.replace(divides, divided) if extent > 1 else term.replace(has_sum, averaged)
