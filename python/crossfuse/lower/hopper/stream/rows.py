"""The state of a thread's two rows, and reductions over the keys of a tile."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import Variable, registers
from crossfuse.lower.hopper.stream.program.parts import Kind, Step
from crossfuse.lower.hopper.stream.recover.settle import positive_factor
from crossfuse.lower.hopper.stream.values import Values

_WARP = 0xFFFFFFFF


class RowState:
    """Registers of values of rows: two of each buffer, one for each half.

    Parameters
    ----------
    buffers : tuple
        Buffers of the program.
    prefix : str
        Of the registers' names.
    """

    def __init__(self, buffers: tuple[Any, ...], prefix: str = "") -> None:
        self._registers = {
            each: registers(f"{prefix}{each.name}", 2, "float32") for each in buffers
        }

    def register(self, buffer: Any, half: int) -> Any:
        """The register of a half; None for a buffer of another kind."""
        found = self._registers.get(buffer)
        return None if found is None else found[half]

    def set(self, buffer: Any, half: int, value: Any) -> None:
        """Assign."""
        ir.script.buffer_store(self._registers[buffer], value, [half])

    def run(self, step: Step, values: Values) -> None:
        """A value of each row."""
        for half in range(2):
            self.set(step.target, half, values.of_row(step.value, half))

    def reduce(self, step: Step, values: Values, count: int, *, deferred: bool) -> None:
        """A maximum or sum over keys; `deferred`: over those that the thread has.

        A factor that a maximum is taken under waits until it is found: rounding keeps the order.
        """
        is_top = step.kind is Kind.TOP
        term, factor = positive_factor(step.value) if is_top else (step.value, None)
        partial = registers(f"partial_{step.target.name}", 4, "float32")
        for register in range(count):
            value = values.of_element(term, register)
            slot = register % 4
            if register >= 4:
                value = _combine(is_top, partial[slot], value)
            ir.script.buffer_store(partial, value, [slot])
        for half in range(2):
            found = _combine(is_top, partial[2 * half], partial[2 * half + 1])
            if not deferred:
                found = quad(found, is_top=is_top)
            found = found if factor is None else found * factor
            before = self.register(step.target, half)
            if step.start is not None:
                before = values.of_row(step.start, half)
            self.set(step.target, half, _combine(is_top, before, found))

    def gather(self, buffer: Any) -> None:
        """Add what the threads of each row have."""
        for half in range(2):
            self.set(buffer, half, quad(self.register(buffer, half), is_top=False))

    def copy(self, other: RowState) -> None:
        """Take over the values of another state."""
        for buffer in self._registers:
            for half in range(2):
                self.set(buffer, half, other.register(buffer, half))


def _combine(is_top: bool, a: Any, b: Any) -> Any:
    return ir.script.max(a, b) if is_top else a + b


def quad(value: Any, *, is_top: bool) -> Any:
    """Combine the values of the four threads that share a row."""
    found = Variable("found", "float32", value)
    for distance in (1, 2):
        found.set(_combine(is_top, found.value, shuffled(found.value, distance)))
    return found.value


def shuffled(value: Any, distance: int) -> Any:
    """The value of the thread whose lane differs by a power of two."""
    return ir.script.cuda._shfl_xor_sync(ir.script.uint32(_WARP), value, distance, 32)
