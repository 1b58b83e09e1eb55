"""One loop for the rows that a warpgroup makes: its own first, then those that are late.

There is one copy of a row's statements so; see `helping` for who is late when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at, grid_places
from crossfuse.lower.hopper.statements import Variable, let
from crossfuse.lower.hopper.sync.flags import Flags, FlagWriter


class RowLoop:
    """Rows of a warpgroup: its own, then, if they are late, those of the one tile that its CTA has.

    Parameters
    ----------
    body : Body
        Of the kernel.
    flags : Flags
        Of the tiles that a product loads.
    first, step : Any
        Number of its first row, and how many rows further the next one is.
    at_once : int
        Rows that it makes side by side, each a step from the one before.
    """

    def __init__(self, body: Body, flags: Flags, first: Any, step: Any, at_once: int = 1) -> None:
        self.body, self.flags, self.at_once = body, flags, at_once
        self._row = Variable("row", "int32", first)
        self._last = Variable("last_row", "int32", flags.down * flags.rows)
        self._step = Variable("row_step", "int32", step)
        self.writer = FlagWriter(body.placed(flags))

    @property
    def step(self) -> Any:
        """How many rows further the next one is."""
        return self._step.value

    def turn_to_late(self, late: Variable, first: Any, step: Any) -> None:
        """Go on with rows of the tile if `late` is not 0, or with none."""
        body = self.body
        program = body.plan.phases[0].program
        places = body.where.places | grid_places(program, body.where.cluster)
        row = at(program.contraction.left.origin[0], places)
        start = let("late_row", row // self.flags.rows * self.flags.rows)
        self._row.set(start + first)
        self._last.set(ir.script.Select(late.value > 0, start + self.flags.rows, 0))
        self._step.set(step)

    @contextmanager
    def each(self) -> Iterator[Any]:
        """Statements for each row, or for the first of those side by side; yields its number."""
        with ir.script.While(self._row.value < self._last.value):
            yield self._row.value
            self._row.set(self._row.value + self.at_once * self.step)
