"""A reduction that is split over clusters: each CTA adds a slice of all partial tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place, Store

#: Neighbours of a row that a thread loads at once.
UNIT = 4


@dataclass(frozen=True)
class SumProgram:
    """The last phase of a kernel whose phase before stores partial tiles.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs, outermost first: of the phase before, too.
    partial : Any
        Partial sums in global memory, [part, row, column].
    parts : int
        Number of parts.
    element : tvm.ir.Var
        Counts the elements of a CTA's slice.
    elements : int
        Their number, a multiple of `UNIT`.
    index : tuple
        Row and column of an element in the output.
    sums : Any
        The buffer that the epilogue reads.
    store : Store
        The epilogue.
    parameters : tuple
        Everything in global memory.
    accumulated : bool
        Whether the parts are added already: `partial` is their sum, [row, column], which has to be
        zero again behind this phase.
    """

    places: tuple[Place, ...]
    partial: Any
    parts: int
    element: Any
    elements: int
    index: tuple[Any, Any]
    sums: Any
    store: Store
    parameters: tuple[Any, ...]
    accumulated: bool = False

    @property
    def results(self) -> tuple[Any, ...]:
        """Buffers that the epilogue reads."""
        return (self.sums,)

    @property
    def first(self) -> tuple[Any, ...]:
        """Row and column of a slice's first element."""
        zero = ir.tirx.IntImm(str(self.element.ty), 0)

        def start(var: Any) -> Any:
            return zero if var.same_as(self.element) else var

        return tuple(ir.sym.Analyzer().simplify(ir.substitute(each, start)) for each in self.index)

    @property
    def analyzer(self) -> Any:
        """An analyzer that knows the ranges of all places and of the elements."""
        known = ir.sym.Analyzer()
        for place in self.places:
            known.bind(place.var, ir.tvm.ir.Range(0, place.extent))
        known.bind(self.element, ir.tvm.ir.Range(0, self.elements))
        return known

    def has_tail(self, dimension: int) -> bool:
        """Whether elements may lie beyond the output: rows are 0, columns 1."""
        inside = self.index[dimension] < self.store.tile.extents[dimension]
        return not self.analyzer.can_prove(inside)

    def begins_inside(self, dimension: int) -> bool:
        """Whether all slices begin within the output: rows are 0, columns 1."""
        inside = self.first[dimension] < self.store.tile.extents[dimension]
        return bool(self.analyzer.can_prove(inside))

    def with_parameters(self, images: Mapping[Any, Any]) -> SumProgram:
        """Return the program on other buffers than the function's parameters."""
        return replace(
            self,
            partial=images[self.partial],
            store=self.store.with_parameters(images),
            parameters=tuple(images[each] for each in self.parameters),
        )
