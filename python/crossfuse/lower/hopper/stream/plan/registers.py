"""Which registers of a thread hold which buffer of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.stream.program.parts import Kind, Step
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.hopper.stream.recover.settle import reads


@dataclass(frozen=True)
class RegisterPlan:
    """Registers of a thread.

    Attributes
    ----------
    arrays : tuple[tuple[Any, int], ...]
        Buffers of elements of a tile, each with the number of its array; scores have the first.
    rows : tuple
        Buffers of values of rows.
    deferred : tuple
        Of these, sums of which each thread keeps its own part until the stream is over.
    """

    arrays: tuple[tuple[Any, int], ...]
    rows: tuple[Any, ...]
    deferred: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Number of arrays."""
        return 1 + max(number for _, number in self.arrays)

    def array(self, buffer: Any) -> int | None:
        """Number of the array that holds a buffer; None for another one."""
        found = (number for each, number in self.arrays if each.same_as(buffer))
        return next(found, None)


def plan_registers(program: StreamProgram) -> RegisterPlan:
    """Give each buffer its registers: elements take the place of those that they are made of."""
    arrays: list[tuple[Any, int]] = [(program.scores, 0)]
    steps = program.all_steps
    for number, step in enumerate(steps):
        known = any(each.same_as(step.target) for each, _ in arrays)
        if step.kind is not Kind.TILE or step is program.weights or known:
            continue
        free = _free(step, steps[number + 1 :], arrays)
        arrays.append((step.target, free))
    written = [*program.before, *program.steps, *program.after]
    rows: list[Any] = []
    for step in written:
        of_rows = step.kind in (Kind.ROW, Kind.TOP, Kind.SUM)
        if of_rows and not any(each.same_as(step.target) for each in rows):
            rows.append(step.target)
    deferred = tuple(each for each in rows if _is_deferred(each, program))
    return RegisterPlan(tuple(arrays), tuple(rows), _independent(deferred, program))


def _free(step: Step, later: tuple[Step, ...], arrays: list[tuple[Any, int]]) -> int:
    """An array that nobody reads behind a step, of those that it makes its elements of."""
    count = 1 + max(number for _, number in arrays)
    for array in range(count):
        held = [each for each, number in arrays if number == array]
        if not any(reads(after.value, each) for after in later for each in held):
            return array
    return count


def _is_deferred(buffer: Any, program: StreamProgram) -> bool:
    """Whether all that happens to a sum in the stream is that it grows, or is multiplied.

    Then threads of a row need not know each other's parts: a factor is the same for all of them.
    """
    begun = [each for each in program.before if each.target.same_as(buffer)]
    zero = len(begun) == 1 and float(getattr(begun[0].value, "value", 1)) == 0
    inside = [*program.all_steps, *program.carries]
    stores = [each for each in inside if each.target.same_as(buffer)]
    others = [each for each in inside if not each.target.same_as(buffer)]
    read = any(reads(each.value, buffer) for each in others)
    sums = [each for each in stores if each.kind is Kind.SUM]
    scaled = [each for each in stores if each.kind is not Kind.SUM]
    plain = all(each.start is None and not reads(each.value, buffer) for each in sums)
    return zero and bool(sums) and plain and not read and all(map(_is_scaled, scaled))


def _is_scaled(step: Step) -> bool:
    """Whether a step multiplies its target by something else."""
    value = step.value
    if step.kind is not Kind.ROW or not hasattr(value, "a") or not str(type(value)).count("Mul"):
        return False
    return any(
        reads(one, step.target) and _is_load(one) and not reads(other, step.target)
        for one, other in ((value.a, value.b), (value.b, value.a))
    )


def _is_load(value: Any) -> bool:
    return hasattr(value, "source")


def _independent(deferred: tuple[Any, ...], program: StreamProgram) -> tuple[Any, ...]:
    """None of them is made of another."""
    return tuple(
        each
        for each in deferred
        if not any(
            reads(step.value, other)
            for step in program.steps
            if step.target.same_as(each)
            for other in deferred
            if other is not each
        )
    )
