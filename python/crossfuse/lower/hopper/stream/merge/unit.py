"""What a thread merges of the states of CTAs that share keys, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.statements import registers
from crossfuse.lower.hopper.stream.plan.inbox import Inbox
from crossfuse.lower.hopper.stream.program.parts import Kind, Step
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.hopper.stream.values import Lanes, Values


def with_row(exists: Any, row: Any, program: StreamProgram, places: dict[Any, Any]) -> Any:
    """A condition, and that a row of a tile is inside the tensor that is stored to."""
    box = program.output
    if not box.shape[box.axis] % box.rows:
        return exists
    inside = at(box.origin[box.axis], places) + row < box.shape[box.axis]
    return ir.script.And(exists, inside)


class Unit:
    """Two neighbouring columns of a row, merged by one thread.

    Parameters
    ----------
    program : StreamProgram
        What is merged.
    inbox : Inbox
        Where states are.
    at_row : tuple
        Row of the tile, and first of both columns.
    places : dict
        Values of places.
    load : Callable
        Writes the load of two floats: into which registers, from which one on, and from which
        offset in the inbox.
    ahead : int
        CTAs whose states are loaded before any of them is merged.
    """

    def __init__(
        self,
        program: StreamProgram,
        inbox: Inbox,
        at_row: tuple[Any, Any],
        places: dict[Any, Any],
        load: Callable[[Any, int, Any], None],
        ahead: int = 1,
    ) -> None:
        assert program.split is not None
        self.program, self.inbox, self.split, self.places = program, inbox, program.split, places
        self.row, self.column = at_row
        self._load_pair, self._ahead, self._first = load, ahead, 0
        steps = (*self.split.before, *self.split.steps, *program.after)
        self._registers: dict[Any, Any] = {}
        for each in steps:
            if each.target not in self._registers:
                count = 1 if each.kind is Kind.ROW else 2
                self._registers[each.target] = registers(str(each.target.name), count, "float32")
        self._slabs = {
            each: registers(str(each.name), 2 * ahead, "float32")
            for each in (*self.inbox.of_rows[::2], self.inbox.of_elements)
        }
        # Nothing here asks for the first row of a warpgroup.
        lanes = Lanes((self.row, self.row), self.column, 0)
        self.values = Values(program, lanes, places, self._of_row, self._of_element)

    def _of_row(self, buffer: Any, half: int) -> Any:
        for number, each in enumerate(self.inbox.of_rows):
            if each.same_as(buffer):
                first = self.inbox.of_rows[number - number % 2]
                return self._slabs[first][self._first + number % 2]
        found = self._registers.get(buffer)
        return None if found is None or len(found.ty.shape) != 1 or _is_pair(found) else found[0]

    def _of_element(self, buffer: Any, register: int) -> Any:
        if buffer.same_as(self.inbox.of_elements):
            return self._slabs[buffer][self._first + register]
        return self._registers[buffer][register]

    def run(self, images: dict[Any, Any]) -> None:
        """Write everything about it; `images` are parameters of the kernel by the function's."""
        self._steps(self.split.before)
        for first in range(0, self.inbox.size, self._ahead):
            slots = range(first, min(first + self._ahead, self.inbox.size))
            for slot in slots:
                self._load(slot, 2 * (slot - first))
            for slot in slots:
                self._first = 2 * (slot - first)
                self._steps(self.split.steps)
        self._steps(self.program.after)
        self._store(images[self.program.output.buffer])

    def _steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            target = self._registers[step.target]
            if step.kind is Kind.ROW:
                ir.script.buffer_store(target, self.values.of_row(step.value, 0), [0])
                continue
            for register in range(2):
                value = self.values.of_element(step.value, register)
                ir.script.buffer_store(target, value, [register])

    def _load(self, slot: int, register: int) -> None:
        """What a CTA has handed over."""
        places = [
            (first, self.inbox.of_row(slot, self.row, pair))
            for pair, first in enumerate(self.inbox.of_rows[::2])
        ]
        places.append((self.inbox.of_elements, self.inbox.element(slot, self.row, self.column)))
        for slab, offset in places:
            self._load_pair(self._slabs[slab], register, offset)

    def _store(self, image: Any) -> None:
        box = self.program.output
        first = [at(each, self.places) for each in box.origin]
        for register in range(2):
            indices = list(first)
            indices[box.axis] = indices[box.axis] + self.row
            indices[-1] = indices[-1] + self.column + register
            value = self.values.of_element(self.program.result, register)
            ir.script.buffer_store(image, value, indices)


def _is_pair(buffer: Any) -> bool:
    return int(buffer.ty.shape[0]) == 2
