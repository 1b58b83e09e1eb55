"""What makes the rows of a left operand, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper.rows.scaled import ScaledRows


@dataclass(frozen=True, eq=False)
class ChunkLoop:
    """The loop over chunks of a row, which a product takes in as they come.

    Attributes
    ----------
    var : tvm.ir.Var
        Number of the chunk.
    count, size : int
        Chunks of a row, and elements of each.
    begin : Any
        Statements in front of the loop.
    carried : tuple
        Buffers in registers that one chunk leaves to the next.
    source : Any
        The matrix in global memory of which a chunk needs its own elements.
    factors : Any
        The matrix that sums of the product are corrected by.
    """

    var: Any
    count: int
    size: int
    begin: Any
    carried: tuple[Any, ...]
    source: Any
    factors: Any


@dataclass(frozen=True, eq=False)
class RowProgram:
    """Statements of one warp, or of one warpgroup, that make a row.

    Attributes
    ----------
    buffer : Any
        The matrix in global memory that they store.
    beside : tuple
        Vectors that they store a number of, such as a scale of each row.
    read : tuple
        What they load: matrices of which a row needs its own, and vectors.
    row, lane : tvm.ir.Var
        Number of the row, and of the thread among those that make it.
    statement : Any
        Statements without blocks, in `row` and `lane`.
    fast : bool
        Whether registers hold two numbers of 16 bits each, see `crossfuse.lower.pack_registers`.
    chunks : ChunkLoop | None
        If `statement` makes a chunk of a row, and not all of it.
    threads : int
        Threads that make a row: a warp, or a warpgroup.
    staged : tuple
        Buffers of four-byte numbers in shared memory, which its warps pass one another.
    count : tvm.ir.Var | None
        Rows of a call, of functions that take fewer: see `with_count`.
    scaled : ScaledRows | None
        What of an element is known before its row has been read, if all else is a factor.
    """

    buffer: Any
    row: Any
    lane: Any
    statement: Any
    fast: bool
    beside: tuple[Any, ...] = ()
    read: tuple[Any, ...] = ()
    chunks: ChunkLoop | None = None
    threads: int = WARP
    staged: tuple[Any, ...] = ()
    count: Any = None
    scaled: ScaledRows | None = None

    @property
    def by_warpgroups(self) -> bool:
        """Whether multiplying warpgroups make rows before they multiply, not warps beside them."""
        return self.threads != WARP

    @property
    def state_places(self) -> int:
        """Numbers that the warps of a warpgroup pass one another."""
        return sum(map(size_of, self.staged))

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return int(self.buffer.ty.shape[0])

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self.buffer.ty.shape[1])

    @property
    def matrices(self) -> tuple[Any, ...]:
        """What it loads that has elements of its own for each row."""
        return tuple(each for each in self.read if len(each.ty.shape) > 1)

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
        scaled = self.scaled
        if scaled is not None:
            scaled = scaled.renamed(lambda var: images.get(var, var))
        beside, read = (tuple(images[e] for e in group) for group in (self.beside, self.read))
        chunks = self.chunks
        if chunks is not None:
            source, factors = images[chunks.source], images[chunks.factors]
            chunks = replace(chunks, source=source, factors=factors)
        return replace(
            self,
            buffer=images[self.buffer],
            statement=statement,
            beside=beside,
            read=read,
            chunks=chunks,
            count=images.get(self.count, self.count),
            scaled=scaled,
        )

    def given(self, row: Any) -> Any:
        """The row of the call that a row is made of."""
        return row if self.count is None else ir.script.min(row, self.count - 1)

    def with_count(self, count: Any, by_row: Sequence[Any]) -> RowProgram:
        """Return the program of calls of fewer rows.

        Those that there are not are made of the last one. So all of the matrix is written, and
        every row is counted at its flag; nothing of them leaves the kernel.

        Parameters
        ----------
        count : tvm.ir.Var
            Rows of a call.
        by_row : Sequence[Any]
            What has as many.
        """
        made = replace(self, count=count, scaled=None)

        def load(node: Any, mutator: Any) -> Any:
            node = mutator.default_mutate(node)
            if not any(node.source.same_as(each) for each in by_row):
                return node
            return node.source[(made.given(self.row), *node.indices[1:])]

        return replace(made, statement=ir.mutate(self.statement, (ir.TensorLoad, load)))

    def of(self, row: Any, lane: Any) -> Any:
        """The statements of a row."""
        values = {self.row: row, self.lane: lane}
        return ir.substitute(self.statement, lambda var: values.get(var, var))


def size_of(buffer: Any) -> int:
    """Elements of a buffer."""
    size = 1
    for extent in buffer.ty.shape:
        size *= int(extent)
    return size
