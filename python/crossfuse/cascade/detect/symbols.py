"""Symbols of what a group reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.group import Group
from crossfuse.cascade.detect.loads import Load, loads_of, same
from crossfuse.cascade.detect.program import Program
from crossfuse.cascade.spec import Stage


class Symbols:
    """The symbols of a group, with what each reads.

    Parameters
    ----------
    program : Program
        The function.
    group : Group
        The reductions.
    values : Mapping
        The site's expressions for variables of the group that are none of the site's.
    axis : tvm.tirx.Var
        The site's reduced loop.
    extents : Mapping
        Of the site's loops.
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
        """A name that nothing has yet, nor the place of what has it."""
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
        return tuple(each for each in self.reads if self._moves(self.reads[each]))

    @property
    def invariants(self) -> tuple[sympy.Symbol, ...]:
        """Symbols that do not."""
        return tuple(each for each in self.reads if not self._moves(self.reads[each]))

    def _moves(self, value: Any) -> bool:
        return any(each.same_as(self.axis) for each in ir.variables(value))

    def of_load(self, load: Any, indices: tuple[Any, ...]) -> sympy.Symbol:
        """The symbol of an input or of what a producer makes, at indices of the site."""
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
        """The symbol of an element that is rounded to few bits before it is used."""
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
