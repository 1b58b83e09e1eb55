"""Writes a cascade of rows that are added up as well: one stream for rows, one for their sums.

Each CTA takes in a group of rows, one after the other. Its threads have the same columns of each,
and add up what rows make of these in registers; at the end they store sums of the group. Another
kernel adds those of all groups, in a fixed order: repeats are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.context import BYTES, StreamContext, stream_context
from crossfuse.cascade.rewrite.rows_first import ColumnSums, realized
from crossfuse.cascade.rewrite.scripting import held, loop, named, spatial, when
from crossfuse.cascade.rewrite.segments import for_lanes
from crossfuse.cascade.rewrite.streaming import StreamWriter, begin, check_stream, streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles, SummingTiles, refused
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.markers import WORKSPACES

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
