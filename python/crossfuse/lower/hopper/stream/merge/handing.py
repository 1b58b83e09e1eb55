"""What a CTA that shares keys hands over of its state, from registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from crossfuse.lower.hopper.statements import when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.program.parts import Kind, Step
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes, Values

#: Rows between both rows of a thread.
_HALF = 8


class Handing(ABC):
    """Sends what one warpgroup has.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    warpgroup : Any
        Index of the multiplying warpgroup.
    lanes : Lanes
        Where its registers are.
    sums : Any
        Registers of the second product.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        self.body, self.plan, self.program = body, body.plan, body.plan.program
        assert self.plan.inbox is not None and self.program.split is not None
        self.inbox, self.split = self.plan.inbox, self.program.split
        self.warpgroup, self.lanes, self.sums = warpgroup, lanes, sums

    @abstractmethod
    def begin(self) -> None:
        """Write what comes before the stream."""

    @abstractmethod
    def finish(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Write what comes behind it."""

    @abstractmethod
    def _send_rows(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        """Hand values of a row over."""

    @abstractmethod
    def _send_elements(self, half: int, values: Values, places: dict[Any, Any]) -> None:
        """Hand sums of a row over."""

    def send(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Hand the state over."""
        for buffer in self.plan.registers.deferred:
            rows.gather(buffer)

        def element(buffer: Any, register: int) -> Any:
            assert buffer.same_as(self.program.sums), buffer
            return self.sums[register]

        values = Values(self.program, self.lanes, places, rows.register, element)
        for half in range(2):
            if self.plan.consumers == 1 and half * _HALF >= self.inbox.rows:
                continue
            with when(self.lanes.rows[half] < self.inbox.rows):
                self._send_rows(half, values, places)
                self._send_elements(half, values, places)

    @property
    def of_rows(self) -> tuple[Step, ...]:
        """Values of rows that are handed over."""
        return tuple(each for each in self.split.slabs if each.kind is Kind.ROW)

    @property
    def of_elements(self) -> Step:
        """Sums that are handed over."""
        (step,) = (each for each in self.split.slabs if each.kind is not Kind.ROW)
        return step
