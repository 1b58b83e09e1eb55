"""Further operands of elements that the threads of a CTA take in turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from crossfuse.lower.hopper.finish.elements import Elements
from crossfuse.lower.hopper.finish.further import Pair
from crossfuse.lower.hopper.statements import let, when
from crossfuse.lower.hopper.warmup import Warmup


class Units:
    """What units of neighbours read besides their sums, one turn ahead.

    Parameters
    ----------
    elements : Elements
        Of the output.
    count : int
        Units of a CTA.
    threads : int
        Threads that take them in turns.
    pairs : int
        Pairs of neighbours in a unit.
    places : Callable
        Function from a unit to the first element, row and column, of each of its pairs.
    warmup : Warmup
        In which nothing is read.
    """

    def __init__(
        self,
        elements: Elements,
        count: int,
        threads: int,
        pairs: int,
        places: Callable[[Any], list[tuple[Any, Any]]],
        warmup: Warmup,
    ) -> None:
        self.elements = elements
        self.count = count
        self.threads = threads
        self.places = places
        self.warmup = warmup
        self.pairs: list[tuple[Pair, ...]] = [elements.registers_of_pair() for _ in range(pairs)]

    def start(self, first: Any) -> None:
        """Read what the first turn needs; `first` is this thread's unit in it."""
        if self.elements.further:
            self._read(first, self.count < self.threads)

    def advance(self, unit: Any) -> None:
        """Read what the turn after that of `unit` needs, if there is one."""
        if self.elements.further and self.count > self.threads:
            self._read(let("unit_ahead", unit + self.threads), True)

    def _read(self, unit: Any, may_end: bool) -> None:
        with when(unit < self.count) if may_end else nullcontext():
            for pairs, (i, j) in zip(self.pairs, self.places(unit), strict=True):
                self.elements.load(pairs, i, j, self.warmup)
