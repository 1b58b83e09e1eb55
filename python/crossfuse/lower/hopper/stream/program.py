"""What streams of tiles, and reductions of a product's rows, compute, as plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, TypeVar

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place

# What a stream is made of: steps, boxes of tensors, a loop, a split.


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
    """One statement of the tile form, for all rows (and keys) of a tile."""

    #: That of its block.
    name: str
    kind: Kind
    #: The buffer in registers that it stores to.
    target: Any
    #: Expression over `StreamProgram.row`, ``key`` and ``column``, places, the stream's variable
    #: and buffers in registers; of a reduction the term, of a mask the condition.
    value: Any
    #: Of a reduction: what it starts with in every tile; None if it goes on with the target. Of a
    #: mask: what stands where the condition does not hold.
    start: Any = None


@dataclass(frozen=True)
class Box:
    """A box of rows of a tensor in global memory, most often each in its whole width."""

    #: A parameter of the function.
    buffer: Any
    #: Index of the first element, in the variables of places and of the stream.
    origin: tuple[Any, ...]
    #: Dimension of the rows; columns are the last one.
    axis: int
    #: Rows of the box. It may reach beyond the tensor: loads find zeros there, and nothing is
    #: stored. Of what is stored, those that count: a tile may have more.
    rows: int
    #: Columns of the box, of those of a row; 0 for all.
    width: int = 0

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
        """Elements of a row of the box."""
        return self.width or self.shape[-1]


@dataclass(frozen=True)
class Stream:
    """The loop over tiles of keys."""

    var: Any
    #: First value and number of iterations, in the variables of places.
    first: Any
    count: Any
    #: Stages of keys and of values in shared memory; 0 for as many as fit.
    stages: int
    #: Smallest value of the variable, and one past the largest.
    bounds: tuple[int, int]


#: A variable with its first value and its number of values.
Domain = tuple[Any, int, int]


_Steps = TypeVar("_Steps", bound="RowSteps")


def _changed(steps: tuple[Step, ...], change: Callable[[Any], Any]) -> tuple[Step, ...]:
    return tuple(replace(each, value=change(each.value)) for each in steps)


@dataclass(frozen=True, kw_only=True)
class RowSteps(ABC):
    """Steps on the rows of a product's tiles, and on their elements."""

    #: Coordinates of CTAs, outermost first.
    places: tuple[Place, ...]
    #: Variables that steps are written in: row and key in their tiles, column of the output.
    row: Any
    key: Any
    column: Any
    #: Buffer of the product, rows by keys.
    scores: Any
    #: First values of rows.
    before: tuple[Step, ...]
    #: What is done to each tile, in order.
    steps: tuple[Step, ...]
    #: What is made of the values of rows behind them.
    after: tuple[Step, ...]

    @property
    @abstractmethod
    def tile(self) -> tuple[int, int]:
        """Rows and keys of a tile of scores."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns of the output."""

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers that have a register for each element, rather than for each row."""
        return (self.scores,)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Every variable with its range."""
        rows, keys = self.tile
        places = ((each.var, 0, each.extent) for each in self.places)
        own = ((self.row, 0, rows), (self.key, 0, keys), (self.column, 0, self.columns))
        return (*places, *own)

    def mapped(self: _Steps, change: Callable[[Any], Any]) -> _Steps:
        """The same with every expression of steps changed."""
        return replace(
            self,
            before=_changed(self.before, change),
            steps=_changed(self.steps, change),
            after=_changed(self.after, change),
        )


@dataclass(frozen=True)
class Split:
    """Keys divided among CTAs, each of which hands its state over.

    Those of a cluster merge a slice of the columns each; else a second kernel merges all.
    """

    #: Which CTA it is.
    place: Place
    #: What each CTA hands over: of rows, and of rows and columns.
    slabs: tuple[Step, ...]
    #: The merged state as it begins.
    before: tuple[Step, ...]
    #: How the state of one CTA, in slabs, is merged into it; CTAs come in the order of ranks.
    steps: tuple[Step, ...]
    #: Columns that each CTA of a cluster merges: those from ``rank * columns`` on; else all.
    columns: int

    @property
    def in_memory(self) -> bool:
        """Whether states pass to a second kernel, through global memory."""
        return not self.place.in_cluster


@dataclass(frozen=True, eq=False)
class Seen:
    """Which keys rows see."""

    #: Whether they see a key, an expression of the key and of places.
    flag: Any
    #: Whether what they do not see counts for nothing only beside a key that they see.
    needs_some: bool


@dataclass(frozen=True, kw_only=True)
class StreamProgram(RowSteps):
    """A kernel: for each place, a stream of tiles between two products.

    Where CTAs share keys, `after` is what is made of the merged state.
    """

    #: Parameters of the function.
    parameters: tuple[Any, ...]
    stream: Stream
    #: What is loaded, and where results go. `queries` are loaded once. `values` may be `keys`: one
    #: tile, of which the second product takes as many columns as the output has.
    queries: Box
    keys: Box
    values: Box
    output: Box
    #: What becomes of the scores: the left operand of the second product.
    weights: Step
    #: Buffer of the second product, rows by columns.
    sums: Any
    #: What is done to the sums before a tile is added, in order.
    carries: tuple[Step, ...]
    #: Expression of an element of the output.
    result: Any
    #: How CTAs share the keys; `column` is then that of a CTA's slice in `after` and `result`.
    split: Split | None = None
    #: Tiles without any key that rows see are passed by; None if all tiles are gone through.
    seen: Seen | None = None

    @property
    def shares_tile(self) -> bool:
        """Whether keys and values are one tile in shared memory."""
        return self.values is self.keys

    @property
    def beside(self) -> Place | None:
        """The place of CTAs of a cluster that go through the same tiles; None if each is alone."""
        if self.split is not None:
            return None
        return next((each for each in self.places if each.in_cluster), None)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return prod(each.extent for each in self.places if each.in_cluster)

    @property
    def tile_places(self) -> tuple[Place, ...]:
        """Places that tell tiles of rows apart, whichever CTA shares their keys."""
        own = None if self.split is None else self.split.place
        return tuple(each for each in self.places if each is not own)

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers of elements: those of both products."""
        return self.sums, self.scores

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Those of the stream's variable, too."""
        first, end = self.stream.bounds
        return (*super().domains, (self.stream.var, first, end - first))

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return self.output.columns

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and keys of a tile of scores."""
        return self.queries.rows, self.keys.rows

    @property
    def dtype(self) -> str:
        """Element type of all operands."""
        return self.queries.dtype

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """Everything that is done to a tile of scores."""
        return (*self.steps, self.weights)

    def mapped(self, change: Callable[[Any], Any]) -> StreamProgram:
        """The same with every expression of steps and of the result changed."""
        split = self.split
        if split is not None:
            split = replace(
                split,
                slabs=_changed(split.slabs, change),
                before=_changed(split.before, change),
                steps=_changed(split.steps, change),
            )
        (weights,) = _changed((self.weights,), change)
        return replace(
            super().mapped(change),
            weights=weights,
            carries=_changed(self.carries, change),
            result=change(self.result),
            split=split,
        )


# Integer expressions that go up evenly along the rows and the keys of a tile.


@dataclass(frozen=True)
class Affine:
    """An integer expression in the row and the key of an element."""

    value: Any
    #: How much it grows from one row, and from one key, to the next.
    row: int
    key: int


def affine(value: Any, program: RowSteps) -> Affine | None:
    """Read an integer expression; None if it does not grow evenly."""
    if not str(value.ty).startswith("int"):
        return None
    known = ranges(program)
    steps = []
    for var in (program.row, program.key):
        moved = ir.substitute(value, {var: var + 1})
        steps.append(ir.constant(known.simplify(moved - value)))
    row, key = steps
    return None if row is None or key is None else Affine(value, row, key)


def inequality(condition: Any, program: RowSteps) -> Affine | None:
    """An expression that is at least zero just where a condition holds; None if there is none."""
    pairs = {
        ir.tirx.LT: lambda a, b: b - a - 1,
        ir.tirx.LE: lambda a, b: b - a,
        ir.tirx.GT: lambda a, b: a - b - 1,
        ir.tirx.GE: lambda a, b: a - b,
    }
    difference = pairs.get(type(condition))
    if difference is None or not str(condition.a.ty).startswith("int"):
        return None
    return affine(ranges(program).simplify(difference(condition.a, condition.b)), program)


def ranges(program: RowSteps) -> Any:
    """An analyzer that knows the ranges of places, of the stream, and within a tile."""
    return ir.ranged(*program.domains)


def starts_on_tiles(program: StreamProgram) -> bool:
    """Whether all boxes of the output start on multiples of their extents, and end inside."""
    known, box = ranges(program), program.output
    # CTAs that share keys store slices of a box, the first of them its first columns.
    part = [] if program.split is None else [program.split.place.var]
    down, across = (ir.at_zero(box.origin[each], *part) for each in (box.axis, -1))
    aligned = (ir.tirx.floormod(down, box.rows), ir.tirx.floormod(across, box.columns))
    starts = all(known.can_prove_equal(each, 0) for each in aligned)
    return starts and bool(known.can_prove(across + box.columns <= box.shape[-1]))


# What becomes of the rows of a product's tile.


@dataclass(frozen=True, kw_only=True)
class Best(Step):
    """The largest elements of each row in order, and their keys; of equal ones the lower first."""

    #: The buffer of keys; `target` is that of elements, both are [row, rank].
    places: Any
    #: Number of ranks.
    count: int


@dataclass(frozen=True)
class Output:
    """What is stored of each row."""

    box: Box
    #: Expression of an element, over values of rows and the best element of its column's rank.
    value: Any


@dataclass(frozen=True, kw_only=True)
class RowReductions(RowSteps):
    """Reductions over the whole width of a product's tile, and what is stored of them."""

    #: Rows and columns.
    size: tuple[int, int]
    outputs: tuple[Output, ...]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return self.size

    @property
    def columns(self) -> int:
        """Most columns of an output."""
        return max(each.box.columns for each in self.outputs)

    @property
    def best(self) -> tuple[Best, ...]:
        """Steps that find the best elements."""
        return tuple(each for each in self.steps if isinstance(each, Best))

    @property
    def rows(self) -> tuple[Any, ...]:
        """Buffers of values of rows, each once."""
        all_steps = (*self.before, *self.steps, *self.after)
        return tuple(dict.fromkeys(e.target for e in all_steps if not isinstance(e, Best)))
