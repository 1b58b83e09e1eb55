"""The warps that make rows chunk by chunk, and the one that raises their flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.coordinates import at, grid_places
from crossfuse.lower.hopper.flags import FlagWriter
from crossfuse.lower.hopper.phase import PhasePlan
from crossfuse.lower.hopper.rows.chunk_barriers import ChunkBarriers
from crossfuse.lower.hopper.rows.chunk_loop import known_in
from crossfuse.lower.hopper.rows.chunk_plan import BOX, FIRST_WARP, ROW_WARPS, ChunkPlan
from crossfuse.lower.hopper.rows.chunk_statements import quick
from crossfuse.lower.hopper.rows.chunk_stores import number_of, without_stores
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.statements import Variable, let, registers, run, when
from crossfuse.lower.hopper.tma import load_name


@contextmanager
def _each_tile(body: Body, phase: PhasePlan) -> Iterator[tuple[Variable, dict[Any, Any]]]:
    """Statements for each tile of this cluster; yields its number, and values of all places."""
    tile = Variable("tile_of_rows", "int32", body.where.cluster)
    with ir.script.While(tile.value < phase.program.tiles):
        yield tile, body.where.places | grid_places(phase.program, tile.value)
        tile.set(tile.value + body.plan.clusters)


def emit_flags(body: Body, phase: PhasePlan) -> None:
    """Write the thread that raises the flag of each chunk when all warps have stored it.

    Its barrier makes visible to it what they stored, and its release passes that on: the warps
    wait for no memory (PTX ISA, memory consistency model, causality order is transitive).
    """
    chunks, barriers = _chunks(body, phase)
    assert phase.left is not None and phase.awaits is not None
    writer = FlagWriter(body.placed(phase.awaits))
    done = Variable("chunks_told", "int32", 0)
    with _each_tile(body, phase) as (_, places):
        row = let("row_told", at(phase.left.tile.origin[0], places))
        with ir.script.serial(0, chunks.loop.count) as chunk:
            ir.IRBuilder.name("chunk_told", chunk)
            mbarrier.wait(barriers.made(done.value % 2), done.value // 2 % 2)
            writer.raise_flag(row, chunk * chunks.loop.size)
            mbarrier.arrive(barriers.told(done.value % 2))
            done.set(done.value + 1)


def emit_chunks(body: Body, phase: PhasePlan) -> None:
    """Write the warps that make rows, chunk by chunk.

    A warp's rows of a chunk come by TMA, batch by batch; where a batch was, the same rows of the
    next chunk come, or the first chunk of the next tile.
    """
    program, (chunks, barriers) = phase.program.rows, _chunks(body, phase)
    assert program is not None
    _Rows(body, phase, program, chunks, barriers).emit()


class _Rows:
    """Statements of a warp."""

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
        self.ring = body.elements("row_ring", str(self.loop.source.ty.dtype))
        self.done = Variable("chunks_made", "int32", 0)
        self.statement, self.stores = without_stores(
            quick(program.statement), program.lane, chunks.batch
        )
        self.states = [
            (each, registers(f"{each.name}_of_rows", chunks.own * _size(each), str(each.ty.dtype)))
            for each in self.loop.carried
        ]

    def emit(self) -> None:
        chunks, phase = self.chunks, self.phase
        with when(self.where.cluster < phase.program.tiles):
            places = self.where.places | grid_places(phase.program, self.where.cluster)
            row = let("row_first", self._first(places))
            for batch in range(chunks.batches):
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
                with ir.script.unroll(0, chunks.batches) as batch:
                    ir.IRBuilder.name("batch", batch)
                    self._batch(batch, row, end, chunk)
                    with when(more):
                        self._fetch(batch, *following)
                self._tell()

    def _first(self, places: dict[Any, Any]) -> Any:
        """The first row of this warp in a tile."""
        left = self.phase.left
        assert left is not None
        part = at(self.chunks.share, places) * ROW_WARPS + self.warp
        return at(left.tile.origin[0], places) + part * self.chunks.own

    def _end(self, places: dict[Any, Any]) -> Any:
        """Behind the last row of a tile that there is."""
        left = self.phase.left
        assert left is not None
        below = at(left.tile.origin[0], places) + self.chunks.tile
        return ir.script.min(below, self.program.rows)

    def _fetch(self, batch: Any, row: Any, chunk: Any) -> None:
        """Ask for a batch of a chunk."""
        chunks = self.chunks
        address = ir.script.address_of(self.body.maps[chunks.source.name])
        with when(self.where.lane == 0):
            full = self.barriers.full(self.warp, batch)
            mbarrier.expect(full, chunks.batch_bytes)
            for box in range(chunks.loop.size // BOX):
                place = self._place(batch, box, 0) * chunks.item
                to = self.body.region("row_ring")(place)
                column = chunk * chunks.loop.size + box * BOX
                below = row + batch * chunks.batch
                run(ir.script.ptx[load_name(2)](to, address, column, below, full))

    def _place(self, batch: Any, box: Any, row: Any) -> Any:
        """Where a row of a box begins in the ring, in elements."""
        chunks = self.chunks
        boxes = chunks.loop.size // BOX
        first = (self.warp * chunks.batches + batch) * boxes + box
        return (first * chunks.batch + row) * BOX

    def _begin(self, row: Any) -> None:
        """States of all rows before their first chunk."""
        with ir.script.unroll(0, self.chunks.own) as number:
            ir.IRBuilder.name("own", number)
            ir.script.add_to_parent(self._own(self.loop.begin, row + number, number))

    def _batch(self, batch: Any, row: Any, end: Any, chunk: Any) -> None:
        chunks = self.chunks
        mbarrier.wait(self.barriers.full(self.warp, batch), self.done.value % 2)
        first = row + batch * chunks.batch
        with ir.script.unroll(0, chunks.batch) as inside:
            ir.IRBuilder.name("of_batch", inside)
            here = first + inside
            with nullcontext() if chunks.exact else when(here < end):
                statement = self._in_ring(batch, inside)
                for each in self.stores:
                    statement = _moved(statement, each.kept, each.kept, inside)
                number = batch * chunks.batch + inside
                statement = self._own(statement, let("own_row", here), number)
                lane = let("lane", self.where.lane)
                values = {self.program.lane: lane, self.loop.var: chunk}
                ir.script.add_to_parent(ir.substitute(statement, lambda var: values.get(var, var)))
        self._store(first, end, chunk)
        run(ir.script.cuda.warp_sync())  # all lanes have read it

    def _store(self, first: Any, end: Any, chunk: Any) -> None:
        """Numbers of a batch's rows, a lane each."""
        lane, batch = self.where.lane, self.chunks.batch
        inside = lane < batch
        exists = inside if self.chunks.exact else ir.script.And(inside, first + lane < end)
        values = {self.program.row: first + lane, self.loop.var: chunk}
        with when(exists):
            for each in self.stores:
                indices = [
                    ir.substitute(index, lambda var: values.get(var, var))
                    for index in each.store.indices
                ]
                value = number_of(each, lane, batch)
                ir.script.add_to_parent(ir.BufferStore(each.store.buffer, value, indices))

    def _in_ring(self, batch: Any, inside: Any) -> Any:
        """The statements of a chunk, its elements in the ring."""
        loop = self.loop
        known = known_in(self.statement, self.program.lane)

        def load(node: Any, mutator: Any) -> Any:
            if not node.source.same_as(loop.source):
                return mutator.default_mutate(node)
            place = known.simplify(node.indices[1] - loop.var * loop.size)
            box = known.simplify(ir.tirx.floordiv(place, BOX))
            element = known.simplify(ir.tirx.floormod(place, BOX))
            return self.ring[self._place(batch, box, inside) + element]

        return ir.mutate(self.statement, (ir.TensorLoad, load))

    def _own(self, statement: Any, row: Any, number: Any) -> Any:
        """Statements of one of the warp's rows, with its state."""
        for buffer, state in self.states:
            statement = _moved(statement, buffer, state, number * _size(buffer))
        return ir.substitute(statement, lambda var: row if var.same_as(self.program.row) else var)

    def _tell(self) -> None:
        """Tell that this warp has stored a chunk; it runs at most two ahead of the flags."""
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


def _chunks(body: Body, phase: PhasePlan) -> tuple[ChunkPlan, ChunkBarriers]:
    assert phase.chunks is not None and body.chunks is not None
    return phase.chunks, body.chunks


def _size(buffer: Any) -> int:
    (extent,) = (int(each) for each in buffer.ty.shape)
    return extent


def _moved(statement: Any, buffer: Any, to: Any, first: Any) -> Any:
    """Statements with a buffer in another one, from some place on."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return to[first + node.indices[0]] if node.source.same_as(buffer) else node

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not node.buffer.same_as(buffer):
            return node
        return ir.BufferStore(to, node.value, [first + node.indices[0]])

    return ir.mutate(statement, (ir.TensorLoad, load), (ir.BufferStore, store))
