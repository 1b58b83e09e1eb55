"""What makes the rows of a left operand, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir


@dataclass(frozen=True, eq=False)
class RowProgram:
    """Statements of one warp that make a row.

    Attributes
    ----------
    buffer : Any
        The matrix in global memory that they store.
    beside : tuple
        Vectors that they store a number of, such as a scale of each row.
    read : tuple
        What they load: matrices of which a row needs its own, and vectors.
    row, lane : tvm.ir.Var
        Number of the row, and of the thread in its warp.
    statement : Any
        Statements without blocks, in `row` and `lane`.
    fast : bool
        Whether registers hold two numbers of 16 bits each, see `crossfuse.lower.pack_registers`.
    """

    buffer: Any
    row: Any
    lane: Any
    statement: Any
    fast: bool
    beside: tuple[Any, ...] = ()
    read: tuple[Any, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return int(self.buffer.ty.shape[0])

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self.buffer.ty.shape[1])

    @property
    def is_placed(self) -> bool:
        """Whether the address of all that a thread loads comes from its row or its lane.

        A thread that learns these after a wait loads after it, whatever nvcc makes of the loads.
        """
        loads: list[Any] = []
        ir.walk(self.statement, (ir.TensorLoad, loads.append))
        own = {self.row, self.lane}
        return all(
            own & {var for index in each.indices for var in ir.variables(index)}
            for each in loads
            if str(each.source.scope()) == "global"
        )

    def with_parameters(self, images: Mapping[Any, Any]) -> RowProgram:
        """Return the program on other buffers than the function's parameters."""
        statement = ir.substitute(self.statement, lambda var: images.get(var, var))
        beside, read = (tuple(images[e] for e in group) for group in (self.beside, self.read))
        return replace(
            self, buffer=images[self.buffer], statement=statement, beside=beside, read=read
        )

    def of(self, row: Any, lane: Any) -> Any:
        """The statements of a row."""
        values = {self.row: row, self.lane: lane}
        return ir.substitute(self.statement, lambda var: values.get(var, var))
