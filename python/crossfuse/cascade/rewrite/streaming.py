"""Writes a cascade as one stream: segments, their merging, outputs, and sums of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.context import BYTES, StreamContext, stream_context
from crossfuse.cascade.rewrite.phases import check_merges, merge
from crossfuse.cascade.rewrite.rows_first import ColumnSums, realized
from crossfuse.cascade.rewrite.scripting import (
    held,
    loop,
    named,
    numbers,
    spatial,
    steps,
    symbol_of,
    when,
)
from crossfuse.cascade.rewrite.segments import Outputs, Residence, Segment, for_lanes
from crossfuse.cascade.rewrite.tiles import StreamTiles, SummingTiles, refused
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.hardware import WARP
from crossfuse.markers import FAST, MERGE, MERGE_EQUAL, PUSH, RESIDENT_CTAS, WORKSPACES


@checked
def streaming(site: Site, derivation: Derivation, tiles: StreamTiles | None = None) -> Any:
    """Write a cascade as one stream over its axis.

    Each thread takes in its segment of a row, tile by tile::

        for row:
            for cta, thread:  SEGMENT[row, cta, thread] = state of the thread's elements
            for cta, thread:  MERGED[cta, row] (+)= SEGMENT[row, cta, thread]   # merge
            for cta, peer:  INBOX[peer, row, cta] = MERGED[cta, row]            # push
            for cta, thread, other:  FINAL[row, cta, thread] (+)= INBOX[cta, row, other]
            for cta, thread:  outputs of the thread's elements, over FINAL

    ``(+)`` merges tuples, one number for each slot. In one CTA the lines of INBOX are left out.

    Parameters
    ----------
    site : Site
        The cascade in its function; nothing there but the cascade is written anew.
    derivation : Derivation
        How it streams.
    tiles : StreamTiles | None
        Sizes; None takes the defaults.

    Returns
    -------
    tvm.tirx.PrimFunc
        Sequential, with the parameters of the function; `schedule_stream` binds it.

    Raises
    ------
    CascadeRefused
        If the sizes do not fit, or the cascade has columns, producers, or a choice of too
        many numbers.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> site = detect(cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=1024")))[0]
    >>> func = streaming(site, derive(site.cascade))
    >>> [str(each.name) for each in func.params]
    ['x', 'y']
    """
    sizes = tiles or StreamTiles()
    check_stream(site, derivation)
    sizes.check(prod(int(site.extents[each]) for each in site.rows))
    with ir.IRBuilder() as builder, ir.script.prim_func(s_tir=True):
        begin(site, sizes, site.function.params)
        StreamWriter(stream_context(site, derivation, sizes)).run()
    return builder.get()


def begin(site: Site, sizes: StreamTiles, parameters: Iterable[Any]) -> None:
    """Statements: what a function of a stream has before its body."""
    ir.script.func_name(symbol_of(site.function))
    ir.script.func_attr({FAST: 1} | ({RESIDENT_CTAS: sizes.ctas} if sizes.ctas else {}))
    for each in parameters:
        ir.script.arg(str(each.name), each)


def check_stream(site: Site, derivation: Derivation) -> None:
    """Refuse cascades that are no stream of threads."""
    check_merges(derivation.slots)
    for name, stage in site.stages.items():
        if stage.columns:
            raise refused(
                f"stage {name}",
                f"a result with columns ({', '.join(each.name for each in stage.columns)})",
                "one number a row",
                "lower it with matrix products",
            )
    # Places of a choice are the only columns: of all others each would be a statement.
    ranked = any(each.monoid.k for each in derivation.slots)
    for output in site.outputs:
        if output.columns and (output.name in derivation.rows or not ranked):
            raise refused(
                f"output {output.name}",
                f"loops beyond the rows ({', '.join(each.name for each in output.columns)})",
                "loops that the reductions have too, and the axis",
                "compute it apart",
            )
    for symbol, block in site.producers.items():
        raise refused(
            f"element {symbol}",
            f"a result of block '{block}'",
            "elements that are loaded",
            "lower it with matrix products",
        )


class StreamWriter:
    """Writes the blocks of a stream."""

    def __init__(self, context: StreamContext) -> None:
        self.context = context
        self.slots = context.slots
        self.ctas, self.threads = context.mapping.cluster, context.mapping.threads
        self.residence = Residence(context)
        threads = (context.row_count, self.ctas, self.threads)
        self.segments = self._state("segment", threads)
        self.known = {
            each: held(f"{each.name}_of_row", threads, str(context.site.reads[each].ty))
            for each in context.awaited
        }
        self.merged = self._state(
            "cta", (context.row_count,) if self.ctas == 1 else (self.ctas, context.row_count)
        )
        #: Outputs over the axis that stay with the threads.
        self.terms: dict[str, Any] = {}
        self.inbox: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        if self.ctas > 1:
            self.inbox = self._state("inbox", (self.ctas, context.row_count, self.ctas))
            self.final = self._state("final", threads)

    def _state(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        return {
            each.name: held(f"{each.name}_{name}", shape, each.dtype)
            for slot in self.slots
            for each in numbers(slot, self.context.dtype)
        }

    def run(self) -> None:
        """Statements: all rows."""
        with loop("row", self.context.row_count) as row:
            self.take_in(row)

    def take_in(self, row: Any) -> None:
        """Statements: one row."""
        self.nest(row, self._segment)
        self.nest(row, self._merge)
        if self.ctas > 1:
            self.nest(row, self._push)
            self.nest(row, self._fold)
        self.nest(row, self._outputs)

    def nest(self, row: Any, block: Any) -> None:
        """Statements: a block of each thread of a row's CTAs."""
        if self.ctas == 1:
            with loop("thread", self.threads) as thread:
                block(row, 0, thread)
            return
        with loop("cta", self.ctas) as cta, loop("thread", self.threads) as thread:
            block(row, cta, thread)

    def _place(self, row: Any, cta: Any, thread: Any) -> tuple[Any, Any, Any]:
        rank = spatial("cta_", self.ctas, cta) if self.ctas > 1 else 0
        return (
            spatial("row_", self.context.row_count, row),
            rank,
            spatial("thread_", self.threads, thread),
        )

    def _segment(self, row: Any, cta: Any, thread: Any) -> None:
        with ir.script.sblock("segment"):
            place = self._place(row, cta, thread)
            # Stated, because the block reads back what it keeps for outputs.
            invariants = self.context.invariants(self.context.at_row(place[0]))
            awaited = {each: invariants[each] for each in self.known}
            ir.script.reads(
                *[_whole(each.buffer) for each in self.context.swept],
                *[_whole(each.source) for each in awaited.values()],
            )
            ir.script.writes(
                *[each[place] for each in self.segments.values()],
                *[each[place] for each in self.known.values()],
                *[self._kept(each, place) for each in self.residence.buffers.values()],
                *[self._kept(each, place) for each in self.residence.reused.values()],
            )
            for symbol, load in awaited.items():
                ir.script.buffer_store(self.known[symbol], load, list(place))
            Segment(self.context, place, self.residence).run(self.segments)

    def _kept(self, buffer: Any, place: tuple[Any, Any, Any]) -> Any:
        row, cta, thread = place
        count, width = self.context.mapping.held, int(buffer.ty.shape[-1])
        if self.residence.where == "registers":
            return buffer[row, cta, thread, 0:count, 0:width]
        return buffer[cta, row, 0:count, thread, 0:width]

    def _merge(self, row: Any, cta: Any, thread: Any) -> None:
        with ir.script.sblock("merge"):
            at_row = spatial("row_", self.context.row_count, row)
            rank = spatial("cta_", self.ctas, cta) if self.ctas > 1 else 0
            of = named("thread_", ir.script.axis.reduce(self.threads, thread))
            into = (at_row,) if self.ctas == 1 else (rank, at_row)
            ir.script.sblock_attr({MERGE: 1} | self._counts(1))
            self._join(at_row, self.merged, into, self.segments, (at_row, rank, of))

    def _push(self, row: Any, cta: Any, thread: Any) -> None:
        """Send each CTA's state to all: a thread for each peer, several where threads are few."""
        turns = -(-self.ctas // self.threads)
        with steps("turn", turns) as turn, ir.script.sblock("push"):
            at_row, rank, at = self._place(row, cta, thread)
            # A block sees loops around it by its own iterators alone.
            now = spatial("turn_", turns, turn) if turns > 1 else 0
            peer = now * self.threads + at
            ir.script.sblock_attr({PUSH: 1})
            with when(peer < self.ctas):
                for name, buffer in self.inbox.items():
                    index = [ir.tirx.floormod(peer, self.ctas), at_row, rank]
                    ir.script.buffer_store(buffer, self.merged[name][rank, at_row], index)

    def _fold(self, row: Any, cta: Any, thread: Any) -> None:
        with loop("other", self.ctas) as other, ir.script.sblock("fold"):
            place = self._place(row, cta, thread)
            of = named("other_", ir.script.axis.reduce(self.ctas, other))
            if self.ctas & (self.ctas - 1) == 0 and self.ctas <= min(self.threads, WARP):
                ir.script.sblock_attr({MERGE: 1} | self._counts(self.threads))
            self._join(place[0], self.final, place, self.inbox, (place[1], place[0], of))

    def _join(self, row: Any, into: Any, into_place: Any, of: Any, of_place: Any) -> None:
        invariants = self.context.invariants(self.context.at_row(row))
        merge(self.slots, into, into_place, of, of_place, invariants, self.context.dtype)

    def _counts(self, threads: int) -> dict[str, Any]:
        """An annotation of the numbers that count elements, with their value after some threads."""
        mapping = self.context.mapping
        each = mapping.steps * mapping.vector * threads
        if any(tiling.guarded for tiling in mapping.tilings):
            each = 0
        counts = [
            each * (slot.monoid.name == "sum" and slot.contribution == 1)
            for slot in self.slots
            for _ in numbers(slot, self.context.dtype)
        ]
        return {MERGE_EQUAL: counts} if any(counts) else {}

    def _outputs(self, row: Any, cta: Any, thread: Any) -> None:
        with ir.script.sblock("outputs"):
            place = self._place(row, cta, thread)
            held_in = self.final if self.ctas > 1 else self.merged
            index = place if self.ctas > 1 else (place[0],)
            state = {name: buffer[index] for name, buffer in held_in.items()}
            before = {name: buffer[place] for name, buffer in self.segments.items()}
            known = {symbol: buffer[place] for symbol, buffer in self.known.items()}
            Outputs(self.context, place, self.residence, state, before, known, self.terms).run()


def _whole(buffer: Any) -> Any:
    return buffer[tuple(slice(0, int(extent)) for extent in buffer.ty.shape)]


# Writes a cascade of rows that are added up as well: one stream for rows, one for their sums.
#
# Each CTA takes in a group of rows, one after the other. Its threads have the same columns of each,
# and add up what rows make of these in registers; at the end they store sums of the group. Another
# kernel adds those of all groups, in a fixed order: repeats are equal bit by bit.


#: What names of blocks begin with that add the sums of groups, with the number of the sum.
ADDED = "added{}_"
#: Threads that add the sums of groups of a column, and columns of a CTA side by side: a warp loads
#: 16 bytes of each of 8 groups.
_THREADS, _COLUMNS, _UNROLL = 8, 32, 8


def added_tiles(columns: int, groups: int) -> StreamTiles:
    """Sizes of the stream that adds the sums of groups."""
    threads = min(_THREADS, 1 << (groups - 1).bit_length())
    return StreamTiles(threads, 0, _UNROLL, 1, gcd(columns, _COLUMNS))


@checked
def summing(site: Site, derivation: Derivation, tiles: SummingTiles) -> Any:
    """Write a cascade of rows, and the sums over them, as one function of two streams.

    ::

        for group:
            for turn:                                        # row = group * turns + turn
                SEGMENT, MERGED, outputs of the row          # as of `streaming`
                for thread:  TERMS[row, thread, ...] = what the row adds
                for thread:  SUMS[group, thread, ...] += TERMS[row, thread, ...]
            for thread:  PARTIAL[group, column] = SUMS[group, thread, ...]
        for column:  sums over groups, and what is made of them

    It is sequential, with the parameters of the whole function; `schedule_summing` binds it.
    Refused are sizes that do not fit, and a cascade that is no stream.
    """
    check_stream(site, derivation)
    tiles.check(prod(int(site.extents[each]) for each in site.rows))
    sums: ColumnSums = site.sums
    if int(site.extents[site.axis]) != int(sums.sums[0].buffer.ty.shape[0]):
        raise refused(
            f"sum {sums.sums[0].buffer.name}",
            "columns that are not those of a row",
            "a sum of each element of the rows",
            "compute it apart",
        )
    added = [_added(each, n, tiles.groups) for n, each in enumerate(sums.added(tiles.groups))]
    with ir.IRBuilder() as builder, ir.script.prim_func(s_tir=True):
        rows = [each for each in site.function.params if str(each.name) not in sums.terms]
        begin(site, tiles.stream, rows)
        _SummingWriter(stream_context(site, derivation, tiles.stream), sums, tiles.groups).run()
    return _joined(sums, builder.get(), added)


def _added(func: Any, number: int, groups: int) -> Any:
    """The stream that adds a sum of groups, whose blocks have names of their own."""
    (site,) = detect(func)
    columns = prod(int(site.extents[each]) for each in site.rows)
    made = streaming(site, derive(site.cascade), added_tiles(columns, groups))

    def rename(block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        return ir.block_like(block, name_hint=f"{ADDED.format(number)}{block.name_hint}")

    root = made.body.block
    return ir.with_body(
        made, realized(ir.block_like(root, body=ir.mutate(root.body, (ir.SBlock, rename))))
    )


def _joined(sums: ColumnSums, rows: Any, added: Sequence[Any]) -> Any:
    """One function of all streams; what passes from one to the other is a workspace."""
    root = rows.body.block
    made = {str(each.name): each for each in (*rows.params, *root.alloc_buffers)}
    own = {str(each.name): each for each in root.alloc_buffers}
    bodies, allocated, passed = [root.body], [*root.alloc_buffers], []
    given = {str(each.name): each for each in rows.params}
    for func in added:
        block = func.body.block
        images = {each: made[str(each.name)] for each in func.params if str(each.name) in made}
        bodies.append(_replaced(block.body, images))
        allocated += block.alloc_buffers
        passed += [str(each.name) for each in func.params if str(each.name) in own]
        given |= {str(e.name): e for e in func.params if str(e.name) not in made}
    params = [given[str(each.name)] for each in sums.function.params]
    both = ir.block_like(root, body=ir.SeqStmt(bodies), alloc_buffers=allocated)
    func = ir.PrimFunc(params, realized(both), rows.ret_type, rows.attrs)
    return func.with_attr(WORKSPACES, ",".join(passed))


def _replaced(body: Any, images: Mapping[Any, Any]) -> Any:
    return ir.substitute(body, lambda var: images.get(var, var))


class _SummingWriter(StreamWriter):
    """Writes the stream of the rows."""

    def __init__(self, context: StreamContext, sums: ColumnSums, groups: int) -> None:
        super().__init__(context)
        mapping, rows = context.mapping, context.row_count
        self.groups, self.turns = groups, rows // groups
        of_thread = (self.ctas, self.threads, mapping.held, mapping.vector)
        self.terms = {name: held(name, (rows, *of_thread), context.dtype) for name in sums.terms}
        self.sums = {
            name: held(f"{each.buffer.name}_sums", (groups, *of_thread), context.dtype)
            for name, each in zip(sums.terms, sums.sums, strict=True)
        }
        self.partial = {
            name: held(str(each.name), tuple(map(int, each.ty.shape)), str(each.ty.dtype))
            for name, each in zip(sums.terms, sums.partial(groups), strict=True)
        }
        self.place: tuple[Any, Any] = (0, 0)

    def run(self) -> None:
        """Statements: all groups."""
        with loop("group", self.groups) as group:
            with loop("turn", self.turns) as turn:
                self.place = (group, turn)
                row = group * self.turns + turn
                self.take_in(row)
                self.nest(row, self._sum)
            self.nest(group, self._store)

    def _sum(self, _: Any, cta: Any, thread: Any) -> None:
        mapping = self.context.mapping
        group, turn = self.place
        with (
            loop("step", mapping.held, "unroll") as step,
            loop("lane", mapping.vector, "unroll") as lane,
            ir.script.sblock("sums"),
        ):
            at_group = spatial("group_", self.groups, group)
            of = named("turn_", ir.script.axis.reduce(self.turns, turn))
            at = (
                spatial("thread_", self.threads, thread),
                spatial("step_", mapping.held, step),
                spatial("lane_", mapping.vector, lane),
            )
            index = [at_group, cta, *at]
            with ir.script.init():
                for into in self.sums.values():
                    ir.script.buffer_store(into, ir.tirx.const(0, self.context.dtype), index)
            for name, into in self.sums.items():
                term = self.terms[name][(at_group * self.turns + of, cta, *at)]
                ir.script.buffer_store(into, into[tuple(index)] + term, index)

    def _store(self, group: Any, cta: Any, thread: Any) -> None:
        mapping = self.context.mapping
        with ir.script.sblock("partial"):
            at_group = spatial("group_", self.groups, group)
            at = spatial("thread_", self.threads, thread)
            for tiling in mapping.tilings:
                with loop("step", tiling.count * tiling.steps, "unroll") as step:
                    now = tiling.first + step
                    inside = mapping.inside(tiling, (group, cta, at), tiling.first, step)
                    with when(inside):
                        for name, into in self.partial.items():
                            self._store_vector(into, self.sums[name], at_group, at, now)

    def _store_vector(self, into: Any, sums: Any, group: Any, thread: Any, step: Any) -> None:
        mapping = self.context.mapping
        first = mapping.element(0, thread, step)
        lanes = gcd(mapping.vector, BYTES // ir.item_bytes(into.ty.dtype))

        def put(number: Any) -> None:
            ir.script.buffer_store(
                into, sums[group, 0, thread, step, number], [group, first + number]
            )

        for_lanes(mapping.vector, lanes, put)
