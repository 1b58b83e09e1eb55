"""Rows made chunk by chunk: the warps that make them, and what products are corrected by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.features.feature import ROWS_BEGUN, ROWS_MADE, ConsumerPart, Feature
from crossfuse.lower.hopper.pipeline import EVICT_FIRST, Cursor, load_name
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.plan import (
    BOX,
    FIRST_WARP,
    FLAG_WARP,
    ChunkBarriers,
    ChunkPlan,
)
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.rows.recover import known_in
from crossfuse.lower.hopper.rows.statements import (
    RowStatements,
    moved,
    number_of,
    quick,
    without_stores,
)
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Variable,
    at,
    branches,
    grid_places,
    let,
    registers,
    run,
    when,
)
from crossfuse.lower.hopper.wgmma import Multiplier
from crossfuse.lower.image import TensorMap
from crossfuse.planner.kernels.memory import Piece
from crossfuse.planner.kernels.phase import ROW_WARPS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.roles import Body, Loader, Steps

#: Alignment of what TMA copies to shared memory without a swizzle.
_COPY = 128


class _Part(ConsumerPart):
    def step(self, steps: Steps, number: Any) -> None:
        """Correct the sums of a warp where a chunk begins."""
        _correct_sums(self.body, steps.phase, steps.multiplier, steps.left.cursor.stage, number)


@dataclass(frozen=True)
class RowsByChunks(Feature):
    """Rows of the left operand are made chunk by chunk, by warps beside those that load."""

    part: ClassVar = _Part
    chunks: ChunkPlan
    tensor_maps: tuple[TensorMap, ...]
    #: Whether nvcc cannot move the loads of rows in front of a wait.
    may_start_early: bool
    fast: bool

    events = (ROWS_BEGUN, ROWS_MADE)

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """A ring of each warp, factors beside left tiles, and barriers."""
        return (
            Piece("row_ring", self.chunks.ring_bytes, _COPY),
            Piece("factors", stages * FACTOR * self.chunks.tile, _COPY),
            Piece("row_barriers", 8 * self.chunks.barriers),
        )

    def addresses(self, body: Body) -> ChunkBarriers:
        """Addresses of its barriers."""
        return ChunkBarriers(self.chunks, partial(body.memory.barrier, "row_barriers"))

    def initialise(self, body: Body) -> None:
        """Initialise them."""
        self.addresses(body).initialise(body.where.thread)

    def noting(self, where: Coordinates) -> Any:
        """The first thread that makes a row."""
        return ir.script.And(where.warpgroup == 0, where.thread == FIRST_WARP * WARP)

    def load(self, loader: Loader) -> bool:
        """One warp loads both operands: the one beside it raises flags."""
        with when(loader.body.where.warp == 0):
            _load_both(loader)
        return True

    def beside_loads(self, body: Body) -> None:
        """One warp raises flags, and others make rows."""
        (phase,) = body.plan.phases
        with when(body.where.thread == FLAG_WARP * WARP):
            _emit_flags(body, phase, self.addresses(body))
        with when(body.where.warp >= FIRST_WARP):
            assert phase.program.rows is not None
            _Rows(body, phase, phase.program.rows, self.chunks, self.addresses(body)).emit()


def _load_both(loader: Loader) -> None:
    """Load each step's right tile, then its left one; the first right tiles before any left."""
    body, (phase,) = loader.body, loader.body.plan.phases
    loader.begin()
    left, right = Cursor(body.left), Cursor(body.right)
    steps = phase.program.contraction.steps
    ahead = min(body.right.stages, steps)
    early = Variable("early", "int32", ahead)
    first = body.where.places | grid_places(phase.program, body.where.cluster)
    with (
        when(ir.script.And(body.where.lane == 0, body.where.cluster < phase.program.tiles)),
        ir.script.serial(0, ahead) as step,
    ):
        values = first | {phase.program.contraction.step: step}
        loader.load(phase, right, phase.rights, values)
        right.advance()
    waits = loader.waits(phase)
    with body.each_tile(phase) as places:
        waits.start(places)
        with body.each_step(phase) as (step, number):
            with when(body.where.lane == 0), branches(early.value > 0) as (there, missing):
                with there:
                    early.set(early.value - 1)
                with missing:
                    loader.load(phase, right, phase.rights, places | step)
                    right.advance()
            waits.wait(places | step)
            with when(body.where.lane == 0):
                factors = partial(load_factors, body, phase, places | step, number)
                size = factor_bytes(phase, number)
                loader.load(phase, left, phase.lefts, places | step, size, factors)
            left.advance()
    loader.over()


# The warps that make rows chunk by chunk, and the one that raises their flags.


@contextmanager
def _each_tile(body: Body, phase: PhasePlan) -> Iterator[tuple[Variable, dict[Any, Any]]]:
    """Statements for each tile of this cluster; yields its number, and values of all places."""
    tile = Variable("tile_of_rows", "int32", body.where.cluster)
    with ir.script.While(tile.value < phase.program.tiles):
        yield tile, body.where.places | grid_places(phase.program, tile.value)
        tile.set(tile.value + body.plan.clusters)


def _emit_flags(body: Body, phase: PhasePlan, barriers: ChunkBarriers) -> None:
    """Write the thread that raises the flag of each chunk when all warps have stored it.

    Its barrier makes visible to it what they stored, and its release passes that on: the warps
    wait for no memory (PTX ISA, memory consistency model, causality order is transitive).
    """
    chunks = barriers.plan
    assert phase.left is not None and phase.awaits is not None
    writer = body.placed(phase.awaits)
    done = Variable("chunks_told", "int32", 0)
    with _each_tile(body, phase) as (_, places):
        row = let("row_told", at(phase.left.tile.origin[0], places))
        with ir.script.serial(0, chunks.loop.count) as chunk:
            ir.IRBuilder.name("chunk_told", chunk)
            mbarrier.wait(barriers.made(done.value % 2), done.value // 2 % 2)
            writer.raise_flag(row, chunk * chunks.loop.size)
            mbarrier.arrive(barriers.told(done.value % 2))
            done.set(done.value + 1)


class _Rows:
    """Writes the statements of one warp that makes rows by chunks.

    A warp's rows of a chunk come by TMA, batch by batch; where a batch was, the same rows of the
    next chunk come, or the first chunk of the next tile.
    """

    def __init__(
        self,
        body: Body,
        phase: PhasePlan,
        program: RowProgram,
        chunks: ChunkPlan,
        barriers: ChunkBarriers,
    ) -> None:
        assert program.chunks is not None
        self.body = body
        self.phase = phase
        self.program = program
        self.loop = program.chunks
        self.chunks = chunks
        self.barriers = barriers
        self.where = body.where
        self.warp = let("row_warp", body.where.warp - FIRST_WARP)
        self.ring = body.memory.elements("row_ring", str(self.loop.source.ty.dtype))
        self.done = Variable("chunks_made", "int32", 0)
        statement, self.stores = without_stores(
            quick(program.statement), program.lane, chunks.batch
        )
        self.known = known_in(statement, program.lane)
        self.statements = RowStatements.of(statement, self.loop.source)
        self.states = [(each, self._state(each)) for each in self.loop.carried]

    def _state(self, buffer: Any) -> Any:
        """Registers for what all rows of the warp have in a buffer."""
        count = self.chunks.own * ir.element_count(buffer)
        return registers(f"{buffer.name}_of_rows", count, str(buffer.ty.dtype))

    def emit(self) -> None:
        chunks, phase = self.chunks, self.phase
        with when(self.where.cluster < phase.program.tiles):
            places = self.where.places | grid_places(phase.program, self.where.cluster)
            row = let("row_first", self._first(places))
            for batch in range(chunks.slots):
                self._fetch(batch, row, 0)
        with _each_tile(self.body, phase) as (tile, places):
            row = let("row_own", self._first(places))
            end = let("row_end", self._end(places))
            after = tile.value + self.body.plan.clusters
            next_places = self.where.places | grid_places(phase.program, after)
            row_after = let("row_after", self._first(next_places))
            self._begin(row)
            with ir.script.serial(0, chunks.loop.count) as chunk:
                ir.IRBuilder.name("chunk", chunk)
                last = chunk == chunks.loop.count - 1
                more = ir.script.Or(ir.script.Not(last), after < phase.program.tiles)
                following = (
                    let("row_next", ir.script.Select(last, row_after, row)),
                    let("chunk_next", ir.script.Select(last, 0, chunk + 1)),
                )
                for batch in range(chunks.batches):
                    rows = self._read(batch, row, chunk)
                    later = batch + chunks.slots
                    if later < chunks.batches:
                        self._fetch(later, row, chunk)
                    else:
                        with when(more):
                            self._fetch(later - chunks.batches, *following)
                    self._make(rows, row + batch * chunks.batch, end, chunk)
                self._tell()

    def _first(self, places: dict[Any, Any]) -> Any:
        """The first row of this warp in a tile."""
        left = self.phase.left
        assert left is not None
        part = at(self.chunks.share, places) * ROW_WARPS + self.warp
        return at(left.tile.origin[0], places) + part * self.chunks.own

    def _end(self, places: dict[Any, Any]) -> Any:
        """One past the last row of a tile that the matrix has."""
        left = self.phase.left
        assert left is not None
        below = at(left.tile.origin[0], places) + self.chunks.tile
        return ir.script.min(below, self.program.rows)

    def _fetch(self, batch: int, row: Any, chunk: Any) -> None:
        """Issue the TMA load of a batch of a chunk into the slot of that batch."""
        chunks = self.chunks
        address = ir.script.address_of(self.body.maps[chunks.source.name])
        slot = batch % chunks.slots
        with when(self.where.lane == 0):
            full = self.barriers.full(self.warp, slot)
            mbarrier.expect(full, chunks.batch_bytes)
            to = self.body.memory.region("row_ring")(self._place(slot, 0) * chunks.item)
            box = chunk * (chunks.loop.size // BOX)
            place = (0, box, row + batch * chunks.batch)
            hint = ir.script.uint64(EVICT_FIRST)
            name = f"{load_name(3)}.L2::cache_hint"
            run(ir.script.ptx[name](to, address, *place, full, hint))

    def _place(self, slot: int, row: int) -> Any:
        """Where a row begins in the ring, in elements."""
        chunks = self.chunks
        first = (self.warp * chunks.slots + slot) * chunks.batch + row
        return first * chunks.loop.size

    def _begin(self, row: Any) -> None:
        """Initialise the states of all rows before their first chunk."""
        with ir.script.unroll(0, self.chunks.own) as number:
            ir.IRBuilder.name("own", number)
            begin = self._own(self.loop.begin, number, 0)
            ir.script.add_to_parent(ir.substitute(begin, {self.program.row: row + number}))

    def _read(self, batch: int, row: Any, chunk: Any) -> list[tuple[Any, ...]]:
        """Read a batch to registers, which frees its slot of the ring; returns the rest to do."""
        chunks = self.chunks
        slot, uses = batch % chunks.slots, chunks.batches // chunks.slots
        use = self.done.value * uses + batch // chunks.slots
        mbarrier.wait(self.barriers.full(self.warp, slot), use % 2)
        lane = let("lane", self.where.lane)
        rows = []
        for inside in range(chunks.batch):
            number = batch * chunks.batch + inside
            values = {
                self.program.row: let("own_row", row + number),
                self.program.lane: lane,
                self.loop.var: chunk,
            }
            own = self.statements.fresh()
            for each in own.loads:
                ir.script.add_to_parent(ir.substitute(self._in_ring(each, slot, inside), values))
            rows.append(
                tuple(ir.substitute(self._own(e, number, inside), values) for e in own.rest)
            )
        # Loads may still be on their way while wgmma has shared memory busy, and TMA does not wait.
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        run(ir.script.cuda.warp_sync())  # all lanes have read it
        return rows

    def _make(self, rows: list[tuple[Any, ...]], first: Any, end: Any, chunk: Any) -> None:
        """Write the rows of a batch, interleaved: a statement of each row at a time."""
        for together in zip(*rows, strict=True):
            for inside, each in enumerate(together):
                guarded = not self.chunks.exact and any(
                    ir.is_global(store.buffer) for store in ir.buffer_stores(each)
                )
                with when(first + inside < end) if guarded else nullcontext():
                    ir.script.add_to_parent(each)
        self._store(first, end, chunk)

    def _store(self, first: Any, end: Any, chunk: Any) -> None:
        """Store the numbers of a batch's rows, those of a row by one lane."""
        lane, batch = self.where.lane, self.chunks.batch
        inside = lane < batch
        exists = inside if self.chunks.exact else ir.script.And(inside, first + lane < end)
        values = {self.program.row: first + lane, self.loop.var: chunk}
        with when(exists):
            for each in self.stores:
                indices = [ir.substitute(index, values) for index in each.store.indices]
                value = number_of(each, lane, batch)
                ir.script.add_to_parent(ir.BufferStore(each.store.buffer, value, indices))

    def _in_ring(self, statement: Any, slot: int, inside: int) -> Any:
        """A statement that loads elements of a chunk, from the ring."""
        loop = self.loop

        def place(indices: Any) -> tuple[Any, Any]:
            column = self.known.simplify(indices[1] - loop.var * loop.size)
            return self.ring, [self._place(slot, inside) + column]

        return moved(statement, {loop.source: place})

    def _own(self, statement: Any, number: int, inside: int) -> Any:
        """A statement of one of the warp's rows, with its state and its place in a batch."""
        states = {old: _behind(new, number * ir.element_count(old)) for old, new in self.states}
        kept = {each.kept: _behind(each.kept, inside) for each in self.stores}
        return moved(statement, states | kept)

    def _tell(self) -> None:
        """Arrive once this warp has stored a chunk; it is at most two chunks ahead of the flags."""
        run(ir.script.ptx.fence.proxy.async_.global_())
        run(ir.script.cuda.warp_sync())
        done, barriers = self.done, self.barriers
        # One lane: others might see the phase after the next.
        with when(self.where.lane == 0):
            with when(done.value >= 2):
                mbarrier.wait(barriers.told(done.value % 2), (done.value // 2 + 1) % 2)
            mbarrier.arrive(barriers.made(done.value % 2))
        run(ir.script.cuda.warp_sync())
        done.set(done.value + 1)


def _behind(buffer: Any, first: int) -> Callable[[Any], tuple[Any, Any]]:
    """A place for accesses: in a buffer, from an element on."""
    return lambda indices: (buffer, [first + indices[0]])


# Factors of a chunk: they come with the left tile of its first step, a slot in each stage.

#: Bytes of a factor, which is float32.
FACTOR = 4


def steps_of_chunk(phase: PhasePlan) -> int:
    """Steps of the reduction that make a chunk."""
    assert phase.chunks is not None
    return phase.chunks.loop.size // phase.program.contraction.depth


def factor_bytes(phase: PhasePlan, step: Any) -> Any:
    """Bytes of the factors that come with a step, for the barrier of its stage to expect."""
    assert phase.chunks is not None
    begins = step % steps_of_chunk(phase) == 0
    return ir.script.Select(begins, FACTOR * phase.chunks.tile, 0)


def load_factors(
    body: Body, phase: PhasePlan, values: dict[Any, Any], step: Any, stage: Any, full: Any
) -> None:
    """Load the factors of a chunk for the rows of a tile, if a step begins one.

    They go to the slot of the left tile's `stage`, and the barrier `full` counts their bytes, see
    `factor_bytes`. `values` are those of all variables of the left tile's origin.
    """
    assert phase.chunks is not None
    left = phase.program.contraction.left
    row, column = (at(each, values) for each in left.origin)
    address = ir.script.address_of(body.maps[phase.chunks.factors.name])
    to = body.memory.region("factors")(stage * (FACTOR * phase.chunks.tile))
    with when(step % steps_of_chunk(phase) == 0):
        chunk = column // phase.chunks.loop.size
        run(ir.script.ptx[load_name(2)](to, address, row, chunk, full))


# Sums of a multiplying warp, corrected where a chunk begins.

_ANY = """\
__device__ __forceinline__ int crossfuse_any_lane(int found) {
  return __any_sync(0xffffffffu, found);
}
"""


def _correct_sums(
    body: Body, phase: PhasePlan, multiplier: Multiplier, stage: Any, number: Any
) -> None:
    """Multiply a warp's sums by the factors of their rows, if any row has one, as `stage` has come.

    Factors are 1 but for rows that have outgrown what they were made for: sums stay with the
    tensor cores then, and nobody waits. Warps differ, as each has rows of its own.
    """
    chunks, where = phase.chunks, body.where
    assert chunks is not None
    with when(ir.script.And(number > 0, number % steps_of_chunk(phase) == 0)):
        warp = (where.warpgroup - 1) * phase.share + where.warp * 16
        row = stage * chunks.tile + warp + where.lane // 4
        factors = body.memory.elements("factors", "float32")
        halves = [let("factor", factors[row + 8 * half]) for half in range(2)]
        run(ir.script.ptx.fence.proxy.async_.shared__cta())  # TMA will overwrite them
        changed = ir.script.Or(halves[0] != 1, halves[1] != 1)
        found = ir.cuda_func_call(
            "crossfuse_any_lane",
            ir.script.Cast("int32", changed),
            source_code=_ANY,
            return_type="int32",
        )
        with when(found != 0):
            multiplier.wait(pending=0)
            multiplier.scale(*halves)
