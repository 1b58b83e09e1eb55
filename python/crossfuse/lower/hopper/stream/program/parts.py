"""What a stream of tiles is made of, as plain values: steps, boxes of tensors, a loop, a split."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from crossfuse.lower.hopper.program.tile import Place


class Axis(Enum):
    """What a loop of a tile goes through."""

    ROW = "rows"
    KEY = "keys"
    DEPTH = "depth of the first product"
    COLUMN = "columns of the second product"


class Kind(Enum):
    """What a step does."""

    ROW = "a value of each row"
    TILE = "an element of each row and key"
    MASK = "elements of the scores where a condition does not hold"
    TOP = "the maximum over keys"
    SUM = "the sum over keys"
    BEST = "the largest elements over keys"
    CARRY = "an element of the second product's sums"


@dataclass(frozen=True)
class Step:
    """One statement of the tile form, for all rows (and keys) of a tile.

    Attributes
    ----------
    name : str
        Of its block.
    kind : Kind
        What it does.
    target : Any
        The buffer in registers that it stores to.
    value : Any
        Expression over `StreamProgram.row`, ``key`` and ``column``, places, the stream's variable
        and buffers in registers; of a reduction the term, of a mask the condition.
    start : Any
        Of a reduction: what it starts with in every tile; None if it goes on with the target. Of a
        mask: what stands where the condition does not hold.
    """

    name: str
    kind: Kind
    target: Any
    value: Any
    start: Any = None


@dataclass(frozen=True)
class Box:
    """A box of rows of a tensor in global memory, each in its whole width.

    Attributes
    ----------
    buffer : Any
        A parameter of the function.
    origin : tuple
        Index of the first element, in the variables of places and of the stream.
    axis : int
        Dimension of the rows; columns are the last one.
    rows : int
        Rows of the box. It may reach beyond the tensor: loads find zeros there, and nothing is
        stored. Of what is stored, those that count: a tile may have more.
    """

    buffer: Any
    origin: tuple[Any, ...]
    axis: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return tuple(int(each) for each in self.buffer.ty.shape)

    @property
    def dtype(self) -> str:
        """Element type of the tensor."""
        return str(self.buffer.ty.dtype)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]


@dataclass(frozen=True)
class Stream:
    """The loop over tiles of keys.

    Attributes
    ----------
    var : tvm.ir.Var
        Its variable.
    first, count : Any
        First value and number of turns, in the variables of places.
    stages : int
        Stages of keys and of values in shared memory; 0 for as many as fit.
    bounds : tuple[int, int]
        Smallest value of the variable, and the one behind the largest.
    """

    var: Any
    first: Any
    count: Any
    stages: int
    bounds: tuple[int, int]


#: A variable with its first value and its number of values.
Domain = tuple[Any, int, int]


class Framed(Protocol):
    """What expressions of a tile are written in."""

    @property
    def row(self) -> Any:
        """The row in the tile."""

    @property
    def key(self) -> Any:
        """The key in the tile."""

    @property
    def column(self) -> Any:
        """The column of the output."""

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers that have a register for each element, rather than for each row."""

    @property
    def domains(self) -> tuple[Domain, ...]:
        """What variables go through: those of places and of the stream, row, key and column."""


@dataclass(frozen=True)
class Split:
    """Keys divided among CTAs, each of which hands its state over.

    Those of a cluster merge a slice of the columns each; else a second kernel merges all.

    Attributes
    ----------
    place : Place
        Which CTA it is.
    slabs : tuple[Step, ...]
        What each CTA hands over: of rows, and of rows and columns.
    before : tuple[Step, ...]
        The merged state as it begins.
    steps : tuple[Step, ...]
        How the state of one CTA, in slabs, is merged into it; CTAs come in the order of ranks.
    columns : int
        Columns that each CTA of a cluster merges: those from ``rank * columns`` on; else all.
    """

    place: Place
    slabs: tuple[Step, ...]
    before: tuple[Step, ...]
    steps: tuple[Step, ...]
    columns: int

    @property
    def in_memory(self) -> bool:
        """Whether states pass to a second kernel, through global memory."""
        return not self.place.in_cluster
