"""Emits TIRx statements: the few forms that kernels are made of.

Everything here adds to the function that `crossfuse._tvm.IRBuilder` is building.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import identifier

#: Attribute of a kernel: a CTA has an SM for itself.
ONE_CTA = {"tirx.launch_bounds_min_blocks_per_sm": 1}


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Context whose statements run if a condition holds."""
    with ir.script.If(condition), ir.script.Then():
        yield


@contextmanager
def branches(condition: Any) -> Iterator[tuple[Any, Any]]:
    """Two contexts, for the statements of either case."""
    with ir.script.If(condition):
        yield ir.script.Then(), ir.script.Else()


def run(call: Any) -> None:
    """Emit a call as a statement."""
    ir.script.evaluate(call)


def let(name: str, value: Any) -> Any:
    """Bind an immutable value to a name."""
    if ir.constant(value) is not None:
        return value
    variable = ir.script.bind(value)
    ir.IRBuilder.name(name, variable)
    return variable


def parameter(buffer: Any) -> Any:
    """Declare a parameter as TIRx has them, with a layout."""
    shape = [int(each) for each in buffer.ty.shape]
    return ir.script.arg(identifier(buffer), ir.script.Buffer(shape, str(buffer.ty.dtype)))


def set_registers(direction: str, count: int) -> None:
    """Move registers between warpgroups (PTX ISA, setmaxnreg)."""
    if count:
        run(getattr(ir.script.ptx.setmaxnreg, direction).sync.aligned.u32(count))


def registers(name: str, count: int, dtype: str) -> Any:
    """Declare a buffer in registers of each thread."""
    buffer = ir.script.alloc_local((count,), dtype)
    ir.IRBuilder.name(name, buffer)
    return buffer


class Variable:
    """A mutable variable in a register of each thread; undefined where its first value is None."""

    def __init__(self, name: str, dtype: str, value: Any = None) -> None:
        self.buffer = registers(name, 1, dtype)
        if value is not None:
            self.set(value)

    @property
    def value(self) -> Any:
        """The current value."""
        return self.buffer[0]

    def set(self, value: Any) -> None:
        """Assign."""
        ir.script.buffer_store(self.buffer, value, [0])

    @property
    def address(self) -> Any:
        """Its address, for calls that write it."""
        return ir.script.address_of(self.buffer[0])
