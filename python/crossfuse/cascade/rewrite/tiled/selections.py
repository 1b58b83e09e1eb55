"""Slots that keep the largest elements and where they stand: top-k, argmax, argmin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot
from crossfuse.cascade.monoid import INDEXED, RANKED
from crossfuse.cascade.rewrite.scripting import Scratch, loop, when
from crossfuse.cascade.rewrite.tiled.ground import At, Local

#: Where places stand that no element has taken: behind all elements.
_NOWHERE = 2**31 - 1


def is_selection(slot: Slot) -> bool:
    """Whether a slot keeps places beside numbers."""
    return slot.monoid.name in (*INDEXED, *RANKED)


def width(slot: Slot) -> int:
    """How many elements a selection keeps."""
    return max(1, slot.monoid.k)


def index_symbol(slot: Slot) -> sympy.Symbol:
    """Where the elements stand."""
    return sympy.Symbol(f"{slot.name}_index", integer=True, nonnegative=True)


@dataclass(frozen=True, eq=False)
class Selection:
    """The best elements of each row, in order; of equal ones that of the lower index comes first.

    Attributes
    ----------
    slot : Slot
        What is selected.
    values, places : Local
        Of each row; the last dimension counts the best.
    """

    slot: Slot
    values: Local
    places: Local

    def begin(self, at: At, init: Any) -> None:
        """Statements: nothing is kept yet."""
        with loop("p", width(self.slot)) as p:
            self._store(at, p, init, ir.tirx.const(_NOWHERE, "int32"))

    def insert(self, at: At, value: Any, place: Any) -> None:
        """Statements: take in an element; what it pushes out moves on down the row."""
        coming = Scratch(f"{self.slot.name}_coming", str(self.values.buffer.ty.dtype), value)
        from_ = Scratch(f"{self.slot.name}_from", "int32", place.astype("int32"))
        moved = Scratch(f"{self.slot.name}_moved", coming.buffer.ty.dtype)
        moved_from = Scratch(f"{self.slot.name}_moved_from", "int32")
        with loop("p", width(self.slot)) as p:
            kept, kept_at = self.load(at, p)
            with when(self._ahead(coming.value, from_.value, kept, kept_at)):
                moved.set(kept)
                moved_from.set(kept_at)
                self._store(at, p, coming.value, from_.value)
                coming.set(moved.value)
                from_.set(moved_from.value)

    def load(self, at: At, p: Any) -> tuple[Any, Any]:
        """The number and the place of rank p."""
        read = (each.buffer[(*each.at(at), p)] for each in (self.values, self.places))
        value, place = read
        return value, place

    def _store(self, at: At, p: Any, value: Any, place: Any) -> None:
        for local, stored in ((self.values, value), (self.places, place)):
            ir.script.buffer_store(local.buffer, stored, [*local.at(at), p])

    def _ahead(self, value: Any, place: Any, other: Any, other_place: Any) -> Any:
        better = value < other if self.slot.monoid.name == "argmin" else value > other
        first = ir.tirx.And(ir.tirx.EQ(value, other), place < other_place)
        return ir.tirx.Or(better, first)
