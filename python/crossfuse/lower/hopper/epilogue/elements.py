"""Elements of a phase's output: their value by the epilogue, and plain stores of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at
from crossfuse.lower.hopper.epilogue.operands import Pair, Read, further_of, read_all
from crossfuse.lower.hopper.fast_math import FAST_TYPES, fast
from crossfuse.lower.hopper.plan.operands import PACKED_TYPES
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.program.tile_program import SumProgram, TileProgram
from crossfuse.lower.hopper.statements import Warmup, let, registers, run, when
from crossfuse.planner.kernels.boxes import ROW_BYTES


class Elements:
    """Emits the epilogue's values for elements of one phase's output, and their stores.

    `tails` say whether tiles reach beyond the rows and beyond the columns of the output.
    """

    def __init__(self, program: TileProgram | SumProgram, tails: tuple[bool, bool]) -> None:
        self.program, self.tails, self.tile = program, tails, program.store.tile
        # Two neighbours share a register where every row has whole pairs.
        self.pairs = self.tile.dtype in PACKED_TYPES and self.tile.extents[1] % 2 == 0
        self.further = further_of(program)
        self._pair: Any = None
        self._part: Any = None

    def begin(self, values: Mapping[Any, Any]) -> Any:
        """Select the part that the next elements belong to; `values` are those of places."""
        part = self.program.store.part
        self._part = None if part is None else let("part", at(part, dict(values)))
        return self._part

    def _place(self, i: Any, j: Any) -> list[Any]:
        return [i, j] if self._part is None else [self._part, i, j]

    def registers_of_pair(self) -> tuple[Pair, ...]:
        """Declare registers for the further operands of two neighbours in a row."""
        return tuple(map(Pair, self.further))

    def load(self, pairs: Sequence[Pair], i: Any, j: Any, warmup: Warmup) -> None:
        """Load all further operands of elements (i, j) and (i, j + 1)."""
        read_all([self.read(each, i, j) for each in pairs], warmup)

    def read(self, pair: Pair, i: Any, j: Any) -> Read:
        """The load of one further operand of elements (i, j) and (i, j + 1)."""
        store = self.program.store
        return Read(
            pair,
            lambda number: pair.further.address(store, i, j + number),
            lambda number: self._tails(i, j + number, pair.further.load.source),
        )

    def value(self, i: Any, j: Any, sums: tuple[Any, ...], read: Sequence[Any] = ()) -> Any:
        """The epilogue's value for element (i, j), given the sum of each product.

        `read` are the values of further operands, in float32.
        """
        store, results = self.program.store, self.program.results

        def read_by(load: Any) -> Any:
            pairs = zip(self.further, read, strict=True)
            return next((each for further, each in pairs if further.is_read_by(load)), None)

        def cast(node: Any, mutator: Any) -> Any:
            if isinstance(node.value, ir.TensorLoad) and str(node.ty) == "float32":
                value = read_by(node.value)
                if value is not None:
                    return value
            return mutator.default_mutate(node)

        def load(node: Any, mutator: Any) -> Any:
            for buffer, each in zip(results, sums, strict=True):
                if node.source.same_as(buffer):
                    return each
            return read_by(node).astype(str(node.ty))

        value = ir.mutate(store.value, (ir.tirx.Cast, cast), (ir.TensorLoad, load))
        if self.tile.dtype in FAST_TYPES:
            value = fast(value)
        known = {store.row: i, store.column: j}
        return ir.substitute(value, known)

    def inside(self, i: Any, j: Any) -> list[Any]:
        """Conditions that an element belongs to the tensor; none if every one of a tile does.

        In a call of fewer rows, those that are left out still belong to it.
        """
        return [each for each in self._tails(i, j, None) if each is not None]

    def _stored(self, i: Any, j: Any) -> list[Any]:
        """Conditions that an element is stored."""
        return [each for each in self._tails(i, j, self.tile.buffer) if each is not None]

    def _tails(self, i: Any, j: Any, buffer: Any) -> list[Any]:
        """The conditions on the row and on the column; None for one that always holds.

        Rows end where those of `buffer` do.
        """
        store = self.program.store
        conditions = [
            index < extent if tail else None
            for index, extent, tail in zip((i, j), self.tile.extents, self.tails, strict=True)
        ]
        end = None if buffer is None else store.end_of_rows(buffer)
        if end is not None:
            conditions[0] = i < end
        if store.zeros_from is not None:
            conditions[1] = j < store.zeros_from
        return conditions

    def pack(
        self,
        target: Any,
        i: Any,
        j: Any,
        low: tuple[Any, ...],
        high: tuple[Any, ...],
        pairs: Sequence[Pair] = (),
    ) -> None:
        """Pack the values of two neighbours in a row into one register.

        `pairs` hold their further operands.
        """
        convert = getattr(ir.script.ptx.cvt.rn, PACKED_TYPES[self.tile.dtype]).f32
        first, second = map(_as_float, self._values(i, j, low, high, pairs))
        run(convert(target, self._or_zero(j + 1, second), self._or_zero(j, first)))

    def _or_zero(self, j: Any, value: Any) -> Any:
        """A value in column j of the next product's left operand: zero beyond its columns."""
        beyond = self.program.store.zeros_from
        if beyond is None:
            return value
        return ir.script.if_then_else(j < beyond, value, ir.script.float32(0))

    def store_pair(
        self,
        i: Any,
        j: Any,
        low: tuple[Any, ...],
        high: tuple[Any, ...],
        warmup: Warmup,
        pairs: Sequence[Pair] = (),
    ) -> None:
        """Store elements (i, j) and (i, j + 1), each if it belongs to the output.

        `pairs` hold their further operands.
        """
        if self.tile.dtype == "float32" and self.tile.extents[1] % 2 == 0:
            with _when_all([*warmup.conditions(), *self._stored(i, j)]):
                values = self._values(i, j, low, high, pairs)
                place = self.tile.buffer.ptr_to(self._place(i, j))
                run(ir.script.ptx["st.global.v2.f32"](place, *values))
            return
        if not self.pairs:
            values = self._values(i, j, low, high, pairs)
            for column, value in zip((j, j + 1), values, strict=True):
                with _when_all([*warmup.conditions(), *self._stored(i, column)]):
                    ir.script.buffer_store(self.tile.buffer, value, self._place(i, column))
            return
        if self._pair is None:
            self._pair = registers("pair", 1, "uint32")
        self.pack(self._pair[0], i, j, low, high, pairs)
        with _when_all([*warmup.conditions(), *self._stored(i, j)]):
            place = self.tile.buffer.ptr_to(self._place(i, j))
            run(ir.script.ptx["st.global.u32"](place, self._pair[0]))

    def _values(
        self, i: Any, j: Any, low: tuple[Any, ...], high: tuple[Any, ...], pairs: Sequence[Pair]
    ) -> tuple[Any, Any]:
        """The epilogue's values for elements (i, j) and (i, j + 1)."""
        first = [pair.values[0] for pair in pairs]
        second = [pair.values[1] for pair in pairs]
        return self.value(i, j, low, first), self.value(i, j + 1, high, second)


def _when_all(conditions: list[Any]) -> Any:
    return when(ir.conjunction(conditions)) if conditions else nullcontext()


def _as_float(value: Any) -> Any:
    """The value as the float32 that the conversion of a pair rounds to the output's type."""
    if isinstance(value, ir.tirx.Cast) and str(value.value.ty) == "float32":
        return value.value
    return value.astype("float32")


class Units:
    """Prefetches further operands for units of neighbours, which threads take in turn.

    A CTA has `count` units of `pairs` pairs each, and `threads` threads that go through them;
    operands are read one iteration early. `places` maps a unit to row and column of the first
    element of each of its pairs.
    """

    def __init__(
        self,
        elements: Elements,
        count: int,
        threads: int,
        pairs: int,
        places: Callable[[Any], list[tuple[Any, Any]]],
        warmup: Warmup,
    ) -> None:
        self.elements = elements
        self.count = count
        self.threads = threads
        self.places = places
        self.warmup = warmup
        self.pairs: list[tuple[Pair, ...]] = [elements.registers_of_pair() for _ in range(pairs)]

    def start(self, first: Any) -> None:
        """Read the operands of this thread's `first` unit."""
        if self.elements.further:
            self._read(first, self.count < self.threads)

    def advance(self, unit: Any) -> None:
        """Read the operands of this thread's unit after `unit`, if there is one."""
        if self.elements.further and self.count > self.threads:
            self._read(let("unit_ahead", unit + self.threads), True)

    def _read(self, unit: Any, may_end: bool) -> None:
        with when(unit < self.count) if may_end else nullcontext():
            for pairs, (i, j) in zip(self.pairs, self.places(unit), strict=True):
                self.elements.load(pairs, i, j, self.warmup)


def scatter(
    where: Coordinates,
    matrices: list[Any],
    pitch: int,
    first: int,
    address: Callable[[Any], Any],
) -> None:
    """Store 8 x 8 matrices from column `first` of a box on, swizzled as its tensor map says.

    Each lane names a row of a matrix: the first 16 lanes those of two matrices one below the other.
    Of two matrices alone, lanes above do not count. `matrices` are registers with two neighbours
    each: both halves of the rows of eight columns, then those of the next eight. `pitch` is the
    bytes of a row of the box, `address` maps a byte in the box to an address (PTX ISA, stmatrix).
    """
    row = where.warp * WARP_ROWS + where.lane % WARP_ROWS
    chunk = first // 8 + (where.lane // WARP_ROWS if len(matrices) > 2 else 0)
    # Every swizzle goes by the number of the 128 bytes that a row lies in.
    pattern = row * pitch // ROW_BYTES % (pitch // 16)
    store = getattr(ir.script.ptx.stmatrix.sync.aligned.m8n8, f"x{len(matrices)}").shared.b16
    inside = row * pitch + (chunk ^ pattern) * 16
    run(store(address(inside), *matrices))
