"""Makes the rows before a product chunk by chunk, so that the product begins with the first chunk.

A quantiser reads whole rows for the scale of their first element. The derivation of the whole
function says what streams instead: a state of the row (its largest magnitude so far), chunks made
with the state so far, and a factor for sums that were made before the state changed. A state that
grows with almost every chunk would correct almost every sum, so a row has a bound of it instead:
one with head room, which is raised only where a chunk outgrows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.context import StreamContext, stream_context
from crossfuse.cascade.rewrite.phases import merge, written
from crossfuse.cascade.rewrite.rows_first import RowsFirst, realized
from crossfuse.cascade.rewrite.scripting import held, named, spatial
from crossfuse.cascade.rewrite.segments import Outputs, Residence, Segment
from crossfuse.cascade.rewrite.tiles import StreamTiles, refused
from crossfuse.cascade.spec import Derivation, OutputSite, Site, Slot, new, value
from crossfuse.hardware import WARP
from crossfuse.markers import CHUNKS, FAST, MERGE


def corrected_product(parts: RowsFirst, factors: Any, chunk: int) -> Any:
    """Rewrite the product so that it multiplies sums by the factor of each chunk where that begins.

    `factors` has one for each chunk and row; it becomes the last parameter.
    """
    made = set(parts.passed)

    def change(block: Any, mutator: Any) -> Any:
        operand = _operand(block, made)
        if block.init is None or operand is None:
            return mutator.default_mutate(block)
        row, element = operand.indices
        sums, term = block.body.value.a, block.body.value.b
        place = ir.tirx.floordiv(element, chunk)
        one = ir.tirx.const(1.0, "float32")
        factor = ir.tirx.Select(
            ir.tirx.EQ(ir.tirx.floormod(element, chunk), 0), factors[place, row], one
        )
        body = ir.BufferStore(block.body.buffer, sums * factor + term, block.body.indices)
        read = ir.tvm.tirx.BufferRegion(factors, [_point(place), _point(row)])
        return ir.block_like(block, body=body, reads=[*block.reads, read])

    root = parts.product.body.block
    body = ir.mutate(root.body, (ir.SBlock, change))
    whole = realized(ir.block_like(root, body=body))
    params = [*parts.product.params, factors]
    return ir.PrimFunc(params, whole, parts.product.ret_type, parts.product.attrs)


def _operand(block: Any, made: set[Any]) -> Any:
    """The load of an operand that is made before, in a product of it; None in other blocks."""
    loads = ir.buffer_loads(block.body)
    found = [each for each in loads if each.source in made and len(each.indices) == 2]
    return found[0] if found else None


def _point(index: Any) -> Any:
    return ir.tvm.ir.Range.from_min_extent(index, 1)


#: Factor by which a bound exceeds the magnitude that raised it: half of the smallest steps of an
#: 8-bit float are lost, and of rows whose values are alike few need a second bound.
HEAD_ROOM = 2.0
#: Name of the factors of sums in the function.
FACTORS = "factors"
_TILES = StreamTiles(threads=WARP)


@dataclass(frozen=True, eq=False)
class RowChunks:
    """The ingredients of rows that are made chunk by chunk."""

    #: The cascade of the rows.
    site: Site
    derivation: Derivation
    #: The state of a row: a largest magnitude.
    slot: Slot
    #: The factor of sums, over the state before and after it changed.
    correction: sympy.Expr
    #: Elements of a chunk.
    chunk: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return int(self.site.extents[self.site.rows[0]])

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return int(self.site.extents[self.site.axis]) // self.chunk


def row_chunks(parts: RowsFirst, site: Site, derivation: Derivation, chunk: int) -> RowChunks:
    """Check that rows can be made in chunks of some elements, for `chunked_rows`.

    `site` is the cascade of `parts.rows`. Refused are a state that is no largest magnitude, sums
    that are not corrected by a factor of it, and chunks that do not divide the rows.
    """
    correction = _correction(parts)
    context = stream_context(site, derivation, _TILES)
    vectors = WARP * context.mapping.vector
    length = int(site.extents[site.axis])
    if chunk < vectors or chunk % vectors or length % chunk or len(site.rows) != 1:
        raise refused(
            "rows, chunk",
            f"chunks of {chunk} of {length} elements in {len(site.rows)} loops over rows",
            f"a multiple of {vectors} (a vector of each thread of a warp) that divides the row",
            "pass another chunk, or make whole rows: leave the chunk out",
        )
    return RowChunks(site, derivation, derivation.slots[0], correction, chunk)


def _correction(parts: RowsFirst) -> sympy.Expr:
    """The factor of sums when the state of a row changes."""
    sites = detect(parts.function)
    slots = derive(sites[0].cascade).slots if len(sites) == 1 else ()
    kinds = [each.monoid.name for each in slots]
    if kinds == ["max", "sum"] and slots[0].init == 0 and slots[1].corrected:
        return sympy.cancel(slots[1].carry / slots[1].symbol)
    raise refused(
        f"state {', '.join(each.name for each in slots) or '?'}",
        f"{', '.join(kinds) or f'{len(sites)} cascades'}",
        "a largest magnitude, and a sum that is corrected by a factor of it",
        "make whole rows: leave the chunk out",
    )


def chunked_rows(parts: RowsFirst, chunks: RowChunks) -> tuple[RowsFirst, Any]:
    """Write rows that are made chunk by chunk, and the product that corrects its sums.

    Both are for `joined`::

        for row:
            bound = 0
            for chunk:                                        # crossfuse.chunks
                for thread:  SEGMENT[row, thread] = state of the thread's elements of the chunk
                for thread:  CTA[row] (+)= SEGMENT[row, thread]                    # merge
                raised = bound if CTA[row] <= bound else 2 * CTA[row]
                factors[chunk, row] = correction(bound, raised)
                for thread:  outputs of the thread's elements of the chunk, over raised
                bound = raised
        for i, n, k:
            sum[i, n] = sum[i, n] * (factors[k // chunk, i] if k % chunk == 0 else 1) + ...
    """
    factors = ir.tirx.decl_buffer((chunks.chunks, chunks.rows), "float32", FACTORS, layout=None)
    corrected = corrected_product(parts, factors, chunks.chunk)
    whole = replace(parts, product=corrected, passed=(*parts.passed, factors))
    return whole, _written(chunks)


def _written(chunks: RowChunks) -> Any:
    with ir.IRBuilder() as builder, ir.script.prim_func(s_tir=True):
        ir.script.func_name("rows")
        ir.script.func_attr({FAST: 1})
        for each in chunks.site.function.params:
            ir.script.arg(str(each.name), each)
        shape = (chunks.chunks, chunks.rows)
        factors = ir.script.arg(FACTORS, ir.script.buffer(shape, "float32"))
        _Writer(chunks, factors).run()
    return builder.get()


class _Writer:
    def __init__(self, chunks: RowChunks, factors: Any) -> None:
        self.chunks = chunks
        self.factors = factors
        self.name = chunks.slot.name

    def run(self) -> None:
        made = self.chunks
        with ir.script.serial(0, made.rows) as row:
            named("row", row)
            with ir.script.sblock("rows"):
                self.row = spatial("row_", made.rows, row)
                self._regions()
                self.bound = held(f"{self.name}_bound", (1,), "float32", "local")
                shape = (made.rows, 1, WARP)
                self.segment = held(f"{self.name}_segment", shape, "float32", "local")
                self.merged = held(f"{self.name}_cta", (made.rows,), "float32", "local")
                ir.script.buffer_store(self.bound, ir.tirx.const(0.0, "float32"), [0])
                annotations = {CHUNKS: made.chunk}
                with ir.script.serial(0, made.chunks, annotations=annotations) as chunk:
                    self.chunk = named("chunk", chunk)
                    self._chunk()

    def _regions(self) -> None:
        """Declare what the block of a row reads and writes, since it holds other blocks."""
        row, site = self.row, self.chunks.site
        length = int(site.extents[site.axis])
        read = dict.fromkeys(each.source for each in ir.buffer_loads(*site.reads.values()))
        ir.script.reads(*[each[row, 0:length] for each in read])
        stored = [
            each.buffer[row, 0:length] if len(each.indices) == 2 else each.buffer[row]
            for each in site.outputs
        ]
        ir.script.writes(*stored, self.factors[0 : self.chunks.chunks, row])

    def _chunk(self) -> None:
        for block in (self._segment, self._merge, self._outputs):
            with ir.script.thread_binding(0, WARP, thread="threadIdx.x") as thread:
                named("thread", thread)
                block(thread)

    def _context(self, chunk: Any) -> StreamContext:
        """One chunk as if it were all of its row."""
        made, site = self.chunks, self.chunks.site

        def moved(expression: Any) -> Any:
            place = chunk * made.chunk + site.axis
            return ir.substitute(expression, lambda var: place if var.same_as(site.axis) else var)

        outputs = tuple(
            OutputSite(e.name, e.buffer, tuple(map(moved, e.indices)), e.columns)
            for e in site.outputs
        )
        extents = {**site.extents, site.axis: made.chunk, chunk: made.chunks}
        reads = {symbol: moved(each) for symbol, each in site.reads.items()}
        here = replace(site, extents=extents, reads=reads, outputs=outputs)
        vectors = made.chunk // (
            WARP * stream_context(here, made.derivation, _TILES).mapping.vector
        )
        return stream_context(here, made.derivation, replace(_TILES, unroll=vectors))

    def _places(self, thread: Any) -> tuple[Any, Any, Any]:
        made = self.chunks
        row = spatial("row_of", made.rows, self.row)
        chunk = spatial("chunk_", made.chunks, self.chunk)
        return row, chunk, spatial("thread_", WARP, thread)

    def _segment(self, thread: Any) -> None:
        with ir.script.sblock("segment"):
            row, chunk, lane = self._places(thread)
            context = self._context(chunk)
            Segment(context, (row, 0, lane), Residence(context)).run({self.name: self.segment})

    def _merge(self, thread: Any) -> None:
        with ir.script.sblock("merge"):
            row = spatial("row_of", self.chunks.rows, self.row)
            of = named("thread_", ir.script.axis.reduce(WARP, thread))
            ir.script.sblock_attr({MERGE: 1})
            into, segments = {self.name: self.merged}, {self.name: self.segment}
            merge((self.chunks.slot,), into, (row,), segments, (row, 0, of), {}, "float32")

    def _outputs(self, thread: Any) -> None:
        with ir.script.sblock("outputs"):
            row, chunk, lane = self._places(thread)
            context = self._context(chunk)
            raised = held(f"{self.name}_raised", (1,), "float32", "local")
            found, bound = self.merged[row], self.bound[0]
            room = _with_room(found)
            ir.script.buffer_store(raised, ir.tirx.Select(found <= bound, bound, room), [0])
            symbols = {value(self.name): bound, new(self.name): raised[0]}
            # By all threads: a quotient that one has to make keeps the others waiting.
            factor = held("factor", (1,), "float32", "local")
            quotient = written(self.chunks.correction, symbols, "float32")
            ir.script.buffer_store(factor, quotient, [0])
            with ir.script.If(lane == 0), ir.script.Then():
                ir.script.buffer_store(self.factors, factor[0], [chunk, row])
            Outputs(context, (row, 0, lane), Residence(context), {self.name: raised[0]}).run()
            ir.script.buffer_store(self.bound, raised[0], [0])


def _with_room(found: Any) -> Any:
    """A bound with head room; the largest numbers have none, but stay finite."""
    largest = ir.tirx.max_value("float32")
    return ir.tirx.min(ir.tirx.const(HEAD_ROOM, "float32") * found, ir.tirx.max(found, largest))
