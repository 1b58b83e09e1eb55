"""Writes a cascade as one stream: segments, their merging, outputs."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.cascade.rewrite.context import StreamContext, stream_context
from crossfuse.cascade.rewrite.phases import check_merges, merge
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
from crossfuse.cascade.rewrite.segments import Outputs, Residence, Segment
from crossfuse.cascade.rewrite.tiles import StreamTiles, refused
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.hardware import WARP
from crossfuse.markers import FAST, MERGE, MERGE_EQUAL, PUSH, RESIDENT_CTAS


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
