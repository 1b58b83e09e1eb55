"""Multiplying warpgroups take turns at the tensor cores, by named barriers (PTX ISA, bar).

While one of them makes exponentials, another one multiplies.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.statements import run, when

#: First of the named barriers, one for each warpgroup; those before it are for meetings.
_FIRST = 8


class Turns:
    """The turns of one warpgroup.

    Parameters
    ----------
    count : int
        Warpgroups; one alone needs no turns.
    warpgroup : Any
        Index of this one.
    """

    def __init__(self, count: int, warpgroup: Any) -> None:
        self.count = count
        self.warpgroup = warpgroup

    def begin(self) -> None:
        """The first warpgroup has the first turn."""
        if self.count > 1:
            with when(self.warpgroup == 0):
                self._arrive(ir.script.int32(0))

    def take(self) -> None:
        """Wait for this warpgroup's turn."""
        if self.count > 1:
            run(ir.script.ptx.bar.sync(*self._barrier(self.warpgroup)))

    def give(self) -> None:
        """It is the next one's turn."""
        if self.count > 1:
            self._arrive((self.warpgroup + 1) % self.count)

    def _arrive(self, warpgroup: Any) -> None:
        run(ir.script.ptx.bar.arrive(*self._barrier(warpgroup)))

    @staticmethod
    def _barrier(warpgroup: Any) -> tuple[Any, Any]:
        return ir.script.Cast("uint32", _FIRST + warpgroup), ir.script.uint32(2 * WARPGROUP)
