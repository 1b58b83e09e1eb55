"""What makes the rows of a left operand, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP, WARPGROUP

# Which rows are raw elements times one number of the row: a product may begin before it is known.
#
#     left[r, k] = cast(factor[r] * (x[r, k] * gain[k]))      an RMS norm
#
#     sum over k of left[r, k] * w[k, n]
#         = factor[r] * sum over k of cast(x[r, k] * gain[k]) * w[k, n]      but for rounding
#
# So the sums of a product's first steps can be of ``x * gain`` alone, and are multiplied by the
# factor once the row has been made. A layer norm, which takes a mean from each element, has no such
# form.
#
# Elements are rounded without their factor then: small ones might lose bits that a factor above 1
# would have kept. So they are taken `SCALE` times as large, and factors as much smaller. An element
# times its gain overflows from 2^104 on then, not from 2^128. The factor is of a sum of squares,
# and that is lost for elements from 2^64 on: of those below, it takes gains from 2^40 on.

#: Of the smallest bfloat16, 2^-133, it makes a number that is rounded as any other, and so are its
#: products with weights.
SCALE = 2.0**24


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Elements of a row without their common factor."""

    #: The factor over `SCALE`, over registers that hold numbers of the row.
    factor: Any
    #: `SCALE` times the element before it is rounded, over loads of `source` and of vectors at
    #: `row` and `column`.
    element: Any
    #: The matrix in global memory that a row is made of.
    source: Any
    #: What else an element needs: one-dimensional, and at the same column.
    vectors: tuple[Any, ...]
    row: Any
    column: Any


def scaled_rows(statement: Any, buffer: Any, row: Any) -> ScaledRows | None:
    """Find the common factor of the elements that a row stores to `buffer`.

    None if an element is no product of a factor of the row and of what is known before the state
    is, or the row's state is of no squares. `statement` is a row's, without blocks.
    """
    stores = ir.buffer_stores(statement)
    written = [each for each in stores if each.buffer.same_as(buffer)]
    if len(written) != 1 or not any(_is_square(each.value) for each in stores):
        return None
    if int(buffer.ty.shape[1]) <= WARPGROUP:
        return None  # what a thread has of its one element would look like a number of the row
    found = _Found(statement, row, written[0].indices[1])
    value = found.inlined(written[0].value)
    if not isinstance(value, ir.tirx.Cast) or str(value.value.ty) != "float32":
        return None
    factors = _factors(value.value)
    of_row = [each for each in factors if found.is_of_row(each)]
    elements = [found.canonical(each) for each in factors if not found.is_of_row(each)]
    if not of_row or not elements or None in elements or len(found.matrices) != 1:
        return None
    (source,) = found.matrices
    factor = _product([*of_row, ir.script.float32(1 / SCALE)])
    element = _product([ir.script.float32(SCALE), *elements])
    return ScaledRows(factor, element, source, tuple(found.vectors), row, found.variable)


def _product(factors: list[Any]) -> Any:
    return reduce(lambda one, other: one * other, factors)


def _factors(value: Any) -> list[Any]:
    """What a product is of, multiplied out."""
    if isinstance(value, ir.tirx.Mul):
        return _factors(value.a) + _factors(value.b)
    return [value]


def _is_square(value: Any) -> bool:
    """Whether a value adds up squares, or makes one."""
    return any(ir.alike(each.a, each.b) for each in ir.nodes(value, ir.tirx.Mul))


class _Found:
    """Matrices and vectors that an element is made of, collected while its factors are read."""

    def __init__(self, statement: Any, row: Any, column: Any) -> None:
        self.stores, self.row, self.column = ir.buffer_stores(statement), row, column
        # What a loop stores is of one element, or not yet of all.
        in_loops = [each for each in ir.sequence(statement) if not isinstance(each, ir.BufferStore)]
        self.changing = {store.buffer for each in in_loops for store in ir.buffer_stores(each)}
        self.known = ir.sym.Analyzer()
        self.variable = ir.Var("column", "int32")
        self.matrices: dict[Any, None] = {}
        self.vectors: dict[Any, None] = {}

    def inlined(self, value: Any) -> Any:
        """A value with what loops copy to registers, or compute there, in their place."""

        def load(node: Any, mutator: Any) -> Any:
            node = mutator.default_mutate(node)
            if str(node.source.scope()) != "local" or ir.element_count(node.source) == 1:
                return node
            made = [each for each in self.stores if each.buffer.same_as(node.source)]
            if len(made) != 1:
                return node
            at = dict(zip(made[0].indices, node.indices, strict=True))
            at = {var: index for var, index in at.items() if ir.constant(var) is None}
            if not all(isinstance(each, ir.Var) for each in at):
                return node
            return self.inlined(ir.substitute(made[0].value, at))

        return ir.mutate(value, (ir.TensorLoad, load))

    def is_of_row(self, factor: Any) -> bool:
        """Whether all that a factor is of are single numbers in registers, the same for a row."""
        sources = [each.source for each in ir.buffer_loads(factor)]
        numbers = (
            str(each.scope()) == "local"
            and ir.element_count(each) == 1
            and each not in self.changing
            for each in sources
        )
        return bool(sources) and all(numbers) and not _outside_loads(factor)

    def canonical(self, factor: Any) -> Any:
        """A factor over loads at the element's row and column; None if it needs something else."""
        misplaced = bool(_outside_loads(factor))

        def load(node: Any, mutator: Any) -> Any:
            nonlocal misplaced
            *above, column = node.indices
            misplaced = misplaced or not self._is_here(node.source, above, column)
            kind = self.matrices if above else self.vectors
            kind[node.source] = None
            return node.source[(*([self.row] if above else []), self.variable)]

        made = ir.mutate(factor, (ir.TensorLoad, load))
        return None if misplaced else made

    def _is_here(self, source: Any, above: list[Any], column: Any) -> bool:
        rows = not above or (len(above) == 1 and above[0].same_as(self.row))
        here = self.known.can_prove_equal(column, self.column)
        return ir.is_global(source) and rows and bool(here)


def _outside_loads(value: Any) -> list[Any]:
    """Variables that a value is of beside what it loads, such as the column in a mask."""

    def load(node: Any, _: Any) -> Any:
        return ir.tirx.const(0, str(node.ty))

    return list(ir.variables(ir.mutate(value, (ir.TensorLoad, load))))


@dataclass(frozen=True, eq=False)
class ChunkLoop:
    """The loop over chunks of a row, which a product takes as they come."""

    #: Number of the chunk.
    var: Any
    #: Chunks of a row, and elements of each.
    count: int
    size: int
    #: Statements in front of the loop.
    begin: Any
    #: Buffers in registers that one chunk leaves to the next.
    carried: tuple[Any, ...]
    #: The matrix in global memory of which a chunk needs its own elements.
    source: Any
    #: The matrix that sums of the product are corrected by.
    factors: Any


@dataclass(frozen=True, eq=False)
class RowProgram:
    """Statements of one warp, or of one warpgroup, that make a row."""

    #: The matrix in global memory that they store.
    buffer: Any
    #: Number of the row, and of the thread among those that make it.
    row: Any
    lane: Any
    #: Without blocks, in `row` and `lane`; of one chunk of a row if there are `chunks`.
    statement: Any
    #: Whether registers hold two numbers of 16 bits each, see `crossfuse.lower.buffers`.
    fast: bool
    #: Vectors that they store a number of, such as a scale of each row.
    beside: tuple[Any, ...] = ()
    #: What they load: matrices of which a row needs its own, and vectors.
    read: tuple[Any, ...] = ()
    chunks: ChunkLoop | None = None
    #: Threads that make a row: a warp, or a warpgroup.
    threads: int = WARP
    #: Buffers of four-byte numbers in shared memory, which its warps pass one another.
    staged: tuple[Any, ...] = ()
    #: Rows of a call, of functions that take fewer (a variable): see `with_count`.
    count: Any = None
    #: What of an element is known before its row has been read, if all else is a factor.
    scaled: ScaledRows | None = None

    @property
    def by_warpgroups(self) -> bool:
        """Whether multiplying warpgroups make rows before they multiply, not warps beside them."""
        return self.threads != WARP

    @property
    def state_places(self) -> int:
        """Numbers that the warps of a warpgroup pass one another."""
        return sum(map(ir.element_count, self.staged))

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
        own = {self.row, self.lane}
        return all(
            any(own & set(ir.variables(index)) for index in each.indices)
            for each in ir.global_loads(self.statement)
        )

    def given(self, row: Any) -> Any:
        """The row of the call that a row is made of."""
        return row if self.count is None else ir.script.min(row, self.count - 1)

    def with_count(self, count: Any, by_row: Sequence[Any]) -> RowProgram:
        """The program of calls of `count` rows, of all tensors `by_row`.

        Rows beyond them are made of the last one. So all of the matrix is written, and every row is
        counted at its flag; nothing of them leaves the kernel.
        """
        made = replace(self, count=count, scaled=None)

        row = made.given(self.row)

        def load(node: Any, mutator: Any) -> Any:
            node = mutator.default_mutate(node)
            return node.source[(row, *node.indices[1:])] if ir.among(node.source, by_row) else node

        return replace(made, statement=ir.mutate(self.statement, (ir.TensorLoad, load)))

    def of(self, row: Any, lane: Any) -> Any:
        """The statements of a row, for a thread."""
        return ir.substitute(self.statement, {self.row: row, self.lane: lane})
