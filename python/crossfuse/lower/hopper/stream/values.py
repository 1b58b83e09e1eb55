"""Values of a stream in registers: expressions, rows, masked elements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP_ROWS
from crossfuse.lower.hopper.epilogue.elements import as_float, round_pair
from crossfuse.lower.hopper.statements import (
    Variable,
    branches,
    let,
    registers,
    run,
    when,
)
from crossfuse.lower.hopper.stream.body import OF_WGMMA, Lanes, Layout, StreamBody
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.program import (
    Affine,
    Kind,
    RowSteps,
    Step,
    affine,
    inequality,
    ranges,
)
from crossfuse.lower.hopper.stream.seen_keys import (
    VOTERS,
    load_within,
    positive_factor,
    vote,
    with_flags,
)

if TYPE_CHECKING:
    from crossfuse.lower.hopper.stream.warps import WarpPlan

# Expressions of a stream in the registers of one thread.

#: Integers below this are float32 numbers, and so are their sums.
_EXACT = 1 << 24
#: A word of flags of keys that are all set.
_ALL = ir.script.uint32(0xFFFFFFFF)


@dataclass
class Values:
    """Translates expressions of the current tile to a thread's registers."""

    program: RowSteps
    lanes: Lanes
    #: Values of places and of the stream's variable.
    places: dict[Any, Any]
    #: From a buffer of rows and a half to the register; None for another buffer.
    rows: Callable[[Any, int], Any]
    #: From a buffer of elements and the number of a register to that register.
    elements: Callable[[Any, int], Any]
    _floats: dict[tuple[int, str], Any] = field(default_factory=dict)
    _named: dict[Any, list[Any]] = field(default_factory=dict)
    #: Expressions, the same with flags named, and what was loaded of each of these.
    _asked: list[tuple[Any, Any, dict[Any, list[Any]]]] = field(default_factory=list)
    _flags: dict[Any, list[Any]] = field(default_factory=dict)

    @staticmethod
    def of_sums(
        program: RowSteps,
        lanes: Lanes,
        places: dict[Any, Any],
        rows: Callable[[Any, int], Any],
        sums: Any,
    ) -> Values:
        """Expressions of rows and of the second product's sums."""
        return Values(program, lanes, places, rows, lambda _, register: sums[register])

    def with_rows_named(self, value: Any) -> Any:
        """The same expression with what is made of rows alone made once, and named.

        The compiler does not merge divisions.
        """

        def name(part: Any) -> Any:
            var = ir.tirx.Var("of_row", str(part.ty))
            rows = range(len(self.lanes.rows))
            self._named[var] = [let("of_row", self.of_row(part, half)) for half in rows]
            return var

        return _replace_row_parts(value, self.program, name)

    def ask_flags(self, value: Any) -> None:
        """Load what tensors say of keys alone, yes or no, in an expression of elements."""
        keys, asked = self.lanes.keys or self.program.tile[1], {}
        voters = min(keys, VOTERS)

        def name(part: Any) -> Any:
            var = ir.tirx.Var("flag", "bool")
            asked[var] = [self._flag(part, each, voters) for each in range(0, keys, voters)]
            return var

        if keys % voters == 0 and VOTERS % voters == 0:
            self._asked.append((value, with_flags(value, self.program, name), asked))

    def where_flags(self, value: Any, write: Callable[[Any], None]) -> None:
        """Write something of an expression whose flags, if it has any, were asked for as bits.

        Most tiles have all of them: these get what is left of the expression then.
        """
        found = [each for each in self._asked if each[0].same_as(value) and each[2]]
        if not found:
            write(value)
            return
        _, named, asked = found[0]
        votes = [let("vote", vote(each)) for flags in asked.values() for each in flags]
        words = iter([let("flags", each >> self.lanes.offset.astype("uint32")) for each in votes])
        self._flags |= {var: [next(words) for _ in flags] for var, flags in asked.items()}
        everywhere = ir.substitute(named, dict.fromkeys(asked, ir.tirx.IntImm("bool", 1)))
        with branches(functools.reduce(operator.and_, votes) == _ALL) as (all_, some):
            with all_:
                write(ir.sym.Analyzer().simplify(everywhere))
            with some:
                write(named)

    def _flag(self, part: Any, first: int, voters: int) -> Any:
        """That of this thread's key among 32; lanes share those of fewer."""
        key = (self.lanes.lane if voters == VOTERS else self.lanes.lane % voters) + first
        key = key if self.lanes.first is None else key + self.lanes.first
        return let("flag", self._translate(part, 0, 0, {self.program.key: key}))

    def _bit(self, words: list[Any], register: int) -> Any:
        """The flag of a register's column."""
        word, bit = divmod(self.lanes.layout.column(register), VOTERS)
        return (words[word] & ir.script.uint32(1 << bit)) != ir.script.uint32(0)

    def of_row(self, value: Any, half: int) -> Any:
        """An expression of a row."""
        return self._translate(value, half, 2 * half, {self.program.row: self.lanes.rows[half]})

    def of_column(self, value: Any, half: int, column: Any) -> Any:
        """An expression of a row and a column of the output."""
        known = {self.program.row: self.lanes.rows[half], self.program.column: column}
        return self._translate(value, half, 2 * half, known)

    def of_element(self, value: Any, register: int) -> Any:
        """An expression of an element."""
        half = self.lanes.layout.row(register)
        column = self.lanes.column + self.lanes.layout.column(register)
        known = {
            self.program.row: self.lanes.rows[half],
            self.program.key: column,
            self.program.column: column,
            **{var: self._bit(words, register) for var, words in self._flags.items()},
        }
        return self._translate(self._with_floats(value, register), half, register, known)

    def store(self, target: Any, value: Any, count: int) -> None:
        """Store an expression of each of a thread's first `count` elements to registers."""
        for register in range(count):
            element = self.of_element(value, register)
            ir.script.buffer_store(target, element, [register])

    def placed(self, value: Any, row: Any, key: Any) -> Any:
        """An integer expression at a row and a key."""
        known = self.places | {self.program.row: row, self.program.key: key}
        moved = ir.substitute(value, known)
        return ir.sym.Analyzer().simplify(moved)

    def _translate(self, value: Any, half: int, register: int, known: dict[Any, Any]) -> Any:
        named = {var: both[half] for var, both in self._named.items()}
        known = self.places | named | known

        def load(node: Any, mutator: Any) -> Any:
            if ir.is_global(node.source):
                return load_within(mutator.default_mutate(node), self.program)
            row = self.rows(node.source, half)
            return self.elements(node.source, register) if row is None else row

        value = ir.mutate(value, (ir.TensorLoad, load))
        return ir.substitute(value, known)

    def _with_floats(self, value: Any, register: int) -> Any:
        """Positions as numbers: converted once for each row, and counted on from there."""

        def cast(node: Any, mutator: Any) -> Any:
            found = affine(node.value, self.program) if str(node.ty) == "float32" else None
            if found is None or not found.key or not self._is_exact(node.value):
                return mutator.default_mutate(node)
            half = self.lanes.layout.row(register)
            name = (half, str(node))
            if name not in self._floats:
                first = self.placed(node.value, self.lanes.rows[half], self.lanes.column)
                self._floats[name] = let("position", first.astype("float32"))
            step = found.key * self.lanes.layout.column(register)
            return self._floats[name] + ir.script.float32(float(step))

        return ir.mutate(value, (ir.tirx.Cast, cast))

    def _is_exact(self, value: Any) -> bool:
        bound = ranges(self.program).const_int_bound(value)
        return bound.min_value > -_EXACT and bound.max_value < _EXACT


def _replace_row_parts(value: Any, program: RowSteps, name: Callable[[Any], Any]) -> Any:
    """Replace the largest calls, choices and quotients that are the same in a whole row."""

    def is_of_row(node: Any) -> bool:
        moving = (program.key, program.column, *program.elements)
        return not any(ir.mentions(node, each) for each in moving)

    def visit(node: Any, mutator: Any) -> Any:
        return name(node) if is_of_row(node) else mutator.default_mutate(node)

    kinds = (ir.Call, ir.tirx.Select, ir.tirx.Div)
    return ir.mutate(value, *((kind, visit) for kind in kinds))


# The state of a thread's two rows, and reductions over the keys of a tile.

_WARP = 0xFFFFFFFF


#: Combines values of rows that warps have a part of each, maxima or sums, in all of these warps.
Across = Callable[[list[Any], bool], list[Any]]


class RowState:
    """Registers of values of rows: of each buffer as many as a thread has rows.

    `across` combines what several warps have of the same rows.
    """

    def __init__(
        self,
        buffers: tuple[Any, ...],
        prefix: str = "",
        layout: Layout = OF_WGMMA,
        count: int = 2,
        across: Across | None = None,
    ) -> None:
        self._registers = {
            each: registers(f"{prefix}{each.name}", count, "float32") for each in buffers
        }
        self._layout, self._count, self._across = layout, count, across

    def register(self, buffer: Any, half: int) -> Any:
        """The register of a row of the thread; None for a buffer of another kind."""
        found = self._registers.get(buffer)
        return None if found is None else found[half]

    def set(self, buffer: Any, half: int, value: Any) -> None:
        """Assign to the register of a row."""
        ir.script.buffer_store(self._registers[buffer], value, [half])

    def run(self, step: Step, values: Values) -> None:
        """Compute a value of each row."""
        for half in range(self._count):
            self.set(step.target, half, values.of_row(step.value, half))

    def reduce(self, step: Step, values: Values, count: int, *, deferred: bool) -> None:
        """Compute a maximum or sum over keys; `deferred`: over those that the thread has.

        A positive factor of a maximum is applied to the maximum alone, as rounding keeps the order.
        """
        is_top = step.kind is Kind.TOP
        term, factor = positive_factor(step.value) if is_top else (step.value, None)
        partial = registers(f"partial_{step.target.name}", 2 * self._count, "float32")
        begun: set[int] = set()
        for register in range(count):
            value = values.of_element(term, register)
            slot = 2 * self._layout.row(register) + self._layout.turn(register)
            if slot in begun:
                value = _combine(is_top, partial[slot], value)
            begun.add(slot)
            ir.script.buffer_store(partial, value, [slot])

        def whole(half: int) -> Any:
            return _combine(is_top, partial[2 * half], partial[2 * half + 1])

        for half, found in self._shared(whole, is_top=is_top, deferred=deferred):
            found = found if factor is None else found * factor
            before = self.register(step.target, half)
            if step.start is not None:
                before = values.of_row(step.start, half)
            self.set(step.target, half, _combine(is_top, before, found))

    def gather(self, buffer: Any) -> None:
        """Add what the threads of each row have."""
        for half, found in self._shared(lambda half: self.register(buffer, half), is_top=False):
            self.set(buffer, half, found)

    def copy(self, other: RowState) -> None:
        """Take over the values of another state."""
        for buffer in self._registers:
            for half in range(self._count):
                self.set(buffer, half, other.register(buffer, half))

    def _shared(
        self, own: Callable[[int], Any], *, is_top: bool, deferred: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Each row with what all threads that share it have; `deferred`: with this one's."""
        rows = range(self._count)
        if deferred:
            yield from ((half, own(half)) for half in rows)
            return
        distances = self._layout.distances
        found = (_of_lanes(own(half), distances, is_top=is_top) for half in rows)
        yield from enumerate(found if self._across is None else self._across([*found], is_top))


def _combine(is_top: bool, a: Any, b: Any) -> Any:
    return ir.script.max(a, b) if is_top else a + b


def _of_lanes(value: Any, distances: tuple[int, ...], *, is_top: bool) -> Any:
    """Combine the values of the threads that share a row."""
    found = Variable("found", "float32", value)
    for distance in distances:
        found.set(_combine(is_top, found.value, shuffled(found.value, distance)))
    return found.value


def shuffled(value: Any, distance: int) -> Any:
    """The value of the thread whose lane differs by a power of two."""
    return ir.script.cuda._shfl_xor_sync(ir.script.uint32(_WARP), value, distance, 32)


# What a warpgroup does to each tile of scores.


class Elements:
    """Registers of the elements of a tile, and the steps that go through them."""

    def __init__(self, plan: StreamPlan | WarpPlan) -> None:
        self.plan = plan
        self.program = plan.program
        names = ["scores", *(f"elements_{each}" for each in range(1, plan.registers.count))]
        self.arrays = [registers(each, plan.scores, "float32") for each in names]
        self.words = registers("weights", plan.words, "uint32")

    @property
    def scores(self) -> Any:
        """The registers of the first product."""
        return self.arrays[0]

    def register(self, buffer: Any, register: int) -> Any:
        """The register of an element."""
        return self._array(buffer)[register]

    def _array(self, buffer: Any) -> Any:
        number = self.plan.registers.array(buffer)
        assert number is not None, buffer
        return self.arrays[number]

    def values(self, rows: RowState, lanes: Lanes, places: dict[Any, Any]) -> Values:
        """Expressions of the elements and of the rows' values."""
        return Values(self.program, lanes, places, rows.register, self.register)

    def ask(self, values: Values) -> Values:
        """Load what steps need of memory, while the product of the tile is on its way."""
        for step in self.program.steps:
            chosen = step.kind is Kind.MASK and inequality(step.value, self.program) is None
            if chosen or step.kind is Kind.TILE:
                values.ask_flags(step.value)
        return values

    def run(self, rows: RowState, values: Values) -> None:
        """Do everything that is done to a tile, but for its weights; `values` were asked for."""
        for step in self.program.steps:
            if step.kind is Kind.ROW:
                rows.run(step, values)
            elif step.kind is Kind.TILE:
                self._tile(step, values)
            elif step.kind is Kind.MASK:
                self._mask(step, values)
            else:
                deferred = ir.among(step.target, self.plan.registers.deferred)
                rows.reduce(step, values, self.plan.scores, deferred=deferred)

    def pack(self, values: Values) -> None:
        """Round the weights: pairs of neighbours share a register, as wgmma takes them."""
        value = as_float(self.program.weights.value)
        for word in range(self.plan.words):
            low, high = (values.of_element(value, 2 * word + each) for each in range(2))
            round_pair(self.words[word], self.program.dtype, low, high)

    def _tile(self, step: Step, values: Values) -> None:
        """Compute each element."""
        elements, count = self._array(step.target), self.plan.scores
        values.where_flags(step.value, lambda value: values.store(elements, value, count))

    def _mask(self, step: Step, values: Values) -> None:
        """Replace elements where a condition does not hold, in tiles that may have such."""
        found = inequality(step.value, self.program)
        if found is None:
            values.where_flags(step.value, lambda value: self._choose_all(step, value, values))
            return
        least = let("least", self._least(found, values))
        with when(least < 0):
            firsts = [
                let("margin", values.placed(found.value, row, values.lanes.column))
                for row in values.lanes.rows
            ]
            layout = values.lanes.layout
            for register in range(self.plan.scores):
                step_of_column = -found.key * layout.column(register)
                self._choose(step, register, firsts[layout.row(register)] >= step_of_column)

    def _choose_all(self, step: Step, condition: Any, values: Values) -> None:
        for register in range(self.plan.scores):
            self._choose(step, register, values.of_element(condition, register))

    def _least(self, found: Affine, values: Values) -> Any:
        """The margin of a condition where it is least among the warpgroup's elements."""
        rows = min(WARPGROUP_ROWS, self.program.tile[0])
        row = values.lanes.base + (rows - 1 if found.row < 0 else 0)
        key = ir.tirx.IntImm("int32", self.program.tile[1] - 1 if found.key < 0 else 0)
        return values.placed(found.value, row, key)

    def _choose(self, step: Step, register: int, holds: Any) -> None:
        elements = self._array(step.target)
        chosen = ir.script.Select(holds, elements[register], step.start)
        ir.script.buffer_store(elements, chosen, [register])


# Keeps arithmetic in its place, ahead of a wait.

# ptxas puts arithmetic off until a wait is over, unless an access to memory in between wants it.
_PIN = """\
__device__ __forceinline__ void crossfuse_pin(float x, void* address) {
  unsigned to = (unsigned)__cvta_generic_to_shared(address);
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" \
:: "f"(x), "r"(to) : "memory");
}
"""


def pin_sums(body: StreamBody, rows: RowState) -> None:
    """Have the sums of a tile computed before the wait that comes next, not after it.

    ptxas would put them off, see `_PIN`.
    """
    address = body.memory.region("scratch")(0)
    for step in body.plan.program.steps:
        if step.kind is Kind.SUM:
            both = [rows.register(step.target, half) for half in range(2)]
            run(ir.cuda_func_call("crossfuse_pin", both[0] + both[1], address, source_code=_PIN))
