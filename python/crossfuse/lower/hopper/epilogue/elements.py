"""Elements of a phase's output: what the epilogue makes of their sums, and plain stores of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.epilogue.operands import Pair, Read, further_of, read_all
from crossfuse.lower.hopper.fast_math import FAST_TYPES, fast
from crossfuse.lower.hopper.plan.store import PACKED_TYPES
from crossfuse.lower.hopper.program.tile_program import SumProgram, TileProgram
from crossfuse.lower.hopper.statements import let, registers, run, when
from crossfuse.lower.hopper.warmup import Warmup


class Storing(Protocol):
    """What stores elements: a phase, or the sum of partial tiles."""

    @property
    def program(self) -> TileProgram | SumProgram:
        """Its store, and the buffers of the sums that this reads."""

    @property
    def tails(self) -> tuple[bool, bool]:
        """Whether tiles reach beyond the rows and the columns of the output."""


class Elements:
    """The elements of one phase's output.

    Parameters
    ----------
    plan : Storing
        The phase.
    """

    def __init__(self, plan: Storing) -> None:
        self.plan = plan
        self.tile = plan.program.store.tile
        # Two neighbours share a register where every row has whole pairs.
        self.pairs = self.tile.dtype in PACKED_TYPES and self.tile.extents[1] % 2 == 0
        self.further = further_of(plan.program)
        self._pair: Any = None
        self._part: Any = None

    def begin(self, values: Mapping[Any, Any]) -> Any:
        """Take the part that the next elements belong to; `values` are those of places."""
        part = self.plan.program.store.part
        self._part = None if part is None else let("part", at(part, dict(values)))
        return self._part

    def _place(self, i: Any, j: Any) -> list[Any]:
        return [i, j] if self._part is None else [self._part, i, j]

    def registers_of_pair(self) -> tuple[Pair, ...]:
        """Declare registers for what two neighbours of a row read besides their sums."""
        return tuple(map(Pair, self.further))

    def load(self, pairs: Sequence[Pair], i: Any, j: Any, warmup: Warmup) -> None:
        """Read what elements (i, j) and (i, j + 1) need of all further operands."""
        read_all([self.read(each, i, j) for each in pairs], warmup)

    def read(self, pair: Pair, i: Any, j: Any) -> Read:
        """What elements (i, j) and (i, j + 1) need of an operand."""
        store = self.plan.program.store
        return Read(
            pair,
            lambda number: pair.further.address(store, i, j + number),
            lambda number: self._tails(i, j + number, pair.further.load.source),
        )

    def value(self, i: Any, j: Any, sums: tuple[Any, ...], read: Sequence[Any] = ()) -> Any:
        """The epilogue's value for element (i, j), given the sum of each product.

        `read` are the values of further operands, in float32.
        """
        store, results = self.plan.program.store, self.plan.program.results

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
        return ir.substitute(value, lambda var: known.get(var, var))

    def inside(self, i: Any, j: Any) -> list[Any]:
        """Conditions that an element belongs to the tensor; none if every one of a tile does.

        Of fewer rows than it has, those that are left out belong to it.
        """
        return [each for each in self._tails(i, j, None) if each is not None]

    def _stored(self, i: Any, j: Any) -> list[Any]:
        """Conditions that an element is stored."""
        return [each for each in self._tails(i, j, self.tile.buffer) if each is not None]

    def _tails(self, i: Any, j: Any, buffer: Any) -> list[Any]:
        """The condition on the row and that on the column; None for one that always holds.

        Rows end where those of `buffer` do.
        """
        store = self.plan.program.store
        conditions = [
            index < extent if tail else None
            for index, extent, tail in zip((i, j), self.tile.extents, self.plan.tails, strict=True)
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
        """Two neighbours of a row in one register; `pairs` hold what they read."""
        convert = getattr(ir.script.ptx.cvt.rn, PACKED_TYPES[self.tile.dtype]).f32
        first, second = map(_as_float, self._values(i, j, low, high, pairs))
        run(convert(target, self._or_zero(j + 1, second), self._or_zero(j, first)))

    def _or_zero(self, j: Any, value: Any) -> Any:
        """A value of column j of what the next product multiplies: zero beyond its columns."""
        beyond = self.plan.program.store.zeros_from
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

        `pairs` hold what they read besides their sums.
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
            run(ir.script.ptx["st.global.u32"](self.tile.buffer.ptr_to([i, j]), self._pair[0]))

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
    """The float32 that is rounded to the output's type by the conversion of a pair."""
    if isinstance(value, ir.tirx.Cast) and str(value.value.ty) == "float32":
        return value.value
    return value.astype("float32")


# Further operands of elements that the threads of a CTA take in turns.


class Units:
    """What units of neighbours read besides their sums, one turn ahead.

    Parameters
    ----------
    elements : Elements
        Of the output.
    count : int
        Units of a CTA.
    threads : int
        Threads that take them in turns.
    pairs : int
        Pairs of neighbours in a unit.
    places : Callable
        Function from a unit to the first element, row and column, of each of its pairs.
    warmup : Warmup
        In which nothing is read.
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
        """Read what the first turn needs; `first` is this thread's unit in it."""
        if self.elements.further:
            self._read(first, self.count < self.threads)

    def advance(self, unit: Any) -> None:
        """Read what the turn after that of `unit` needs, if there is one."""
        if self.elements.further and self.count > self.threads:
            self._read(let("unit_ahead", unit + self.threads), True)

    def _read(self, unit: Any, may_end: bool) -> None:
        with when(unit < self.count) if may_end else nullcontext():
            for pairs, (i, j) in zip(self.pairs, self.places(unit), strict=True):
                self.elements.load(pairs, i, j, self.warmup)
