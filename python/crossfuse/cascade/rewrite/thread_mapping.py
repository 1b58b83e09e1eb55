"""Maps threads and steps to elements of the axis.

The axis is cut into slices, one for each CTA of a cluster. The threads of a CTA stand side by side
over it, each with a vector of neighbours, and step along::

    element = cta * slice + (step * threads + thread) * vector + lane

Several steps make a tile. Tiles that lie within the axis for all threads come first and need no
conditions; the others, a short rest, are guarded vector by vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tiling:
    """Tiles of one kind: all whole, or all guarded."""

    #: Step at which the first tile begins.
    first: int
    #: Number of tiles.
    count: int
    #: Steps of each tile.
    steps: int
    #: Whether steps may lie beyond the axis.
    guarded: bool


@dataclass(frozen=True)
class ThreadMapping:
    """How the axis is divided among CTAs and threads."""

    #: Elements of the axis.
    length: int
    #: This and the rest as in `StreamTiles`; the vector divides the length.
    threads: int
    vector: int
    unroll: int
    cluster: int

    @property
    def stride(self) -> int:
        """Elements that the threads of a CTA take in at a step."""
        return self.threads * self.vector

    @property
    def steps(self) -> int:
        """Steps of every CTA."""
        return -(-self.length // (self.cluster * self.stride))

    @property
    def slice(self) -> int:
        """Elements of a CTA, those beyond the axis included."""
        return self.steps * self.stride

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """Whole tiles, then guarded ones; only those that there are."""
        last = max(0, self.length - (self.cluster - 1) * self.slice)
        whole = last // (self.unroll * self.stride)
        begun = whole * self.unroll
        found = [Tiling(0, whole, self.unroll, False)] if whole else []
        rest = self.steps - begun
        if rest and rest <= self.unroll and last == self.slice and self.length % self.slice == 0:
            return (*found, Tiling(begun, 1, rest, False))
        full, short = divmod(rest, self.unroll)
        if full:
            found.append(Tiling(begun, full, self.unroll, True))
        if short:
            # Of its own: a tile beyond the CTA's slice would be that of the next one.
            found.append(Tiling(begun + full * self.unroll, 1, short, True))
        return tuple(found)

    @property
    def held(self) -> int:
        """Steps that a thread needs registers for to hold all of its elements."""
        return max(each.first + each.count * each.steps for each in self.tilings)

    def element(self, cta: Any, thread: Any, step: Any, lane: Any = 0) -> Any:
        """Index along the axis."""
        place = cta * self.slice if self.cluster > 1 else 0
        return place + step * self.stride + thread * self.vector + lane

    def inside(self, tiling: Tiling, place: tuple[Any, Any, Any], first: Any, step: Any) -> Any:
        """Condition under which a vector lies within the axis; None where it always does.

        The place is row, CTA and thread; `first` is the tile's first step, and `step` counts from
        it.
        """
        if not tiling.guarded:
            return None
        _, cta, thread = place
        return self.element(cta, thread, first + step) < self.length
