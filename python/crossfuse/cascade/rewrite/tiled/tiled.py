"""Writes a cascade with products as a stream over tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.expressions.to_tir import to_tir
from crossfuse.cascade.rewrite.scripting import loop, spatial, symbol_of
from crossfuse.cascade.rewrite.tiled.block_builder import BlockBuilder
from crossfuse.cascade.rewrite.tiled.operands import Extent, mentions
from crossfuse.cascade.rewrite.tiled.results import Results
from crossfuse.cascade.rewrite.tiled.skipping import span
from crossfuse.cascade.rewrite.tiled.split import Merge, Slabs, part_of
from crossfuse.cascade.rewrite.tiled.state import State
from crossfuse.cascade.rewrite.tiled.stream import Stream
from crossfuse.cascade.rewrite.tiled.tile_context import (
    COLUMNS,
    PARTS,
    ROWS,
    STEPS,
    TileContext,
    extents_of,
    tile_context,
    whole,
)
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.site import Site

#: Name of the block of a tile.
TILE = "tile"
#: Name of the block that merges the states of a tile's CTAs.
MERGE = "merge"


@checked
def tiled(site: Site, derivation: Derivation, tiles: CascadeTiles | None = None) -> Any:
    """Write a cascade with products as one stream over tiles of its axis.

    Attention, for instance::

        for b, h, q:                                  # tiles of rows
            block tile:
                Q_shared = tile of Q
                m, s, O = -inf, 0, 0
                for t in range(tiles that rows of the tile need):
                    K_shared = tile of K
                    S = Q_shared K_shared^T
                    m_old, m = m, max(m, max of S * scale)
                    m_safe, c = select(m == -inf, 0, m), exp2(m_old - m_safe)
                    P = exp2(S * scale - m_safe)
                    s = s * c + sum of P
                    V_shared = tile of V
                    O = O * c + rounded P V_shared
                out = O * select(s > 0, 1 / s, 0)

    Each line is a block of its own inside the tile's, in coordinates of the whole tensors. State
    and tiles that are computed are in scope ``local``, operands in ``shared.dyn``.

    Parameters
    ----------
    site : Site
        The cascade in its function; nothing there but the cascade is written anew.
    derivation : Derivation
        How it streams.
    tiles : CascadeTiles | None
        Sizes; None chooses them.

    Returns
    -------
    tvm.tirx.PrimFunc
        Sequential, with the parameters of the function; `schedule_cascade_tiles` binds it.

    Raises
    ------
    CascadeRefused
        If nothing is multiplied, products are of more than two inputs, or sizes do not fit.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> spec = cascades.parse("attention:batch=1,heads=2,q_len=64,kv_len=128,head_dim=64")
    >>> func = cascade_build.prim_func(spec)
    >>> site = detect(func)[0]
    >>> [str(each.name) for each in tiled(site, derive(site.cascade)).params]
    ['q', 'k', 'v', 'out']
    """
    with ir.IRBuilder() as builder, ir.script.prim_func(s_tir=True):
        ir.script.func_name(symbol_of(site.function))
        for each in site.function.params:
            ir.script.arg(str(each.name), each)
        _Writer(tile_context(site, derivation, tiles or CascadeTiles())).run()
    return builder.get()


class _Writer:
    def __init__(self, context: TileContext) -> None:
        self.context = context
        self.cluster = context.tiles.cluster

    def run(self) -> None:
        slabs = None
        if self.cluster > 1:
            whole_tile = dict.fromkeys((*self._grid(), PARTS), whole(0))
            slabs = Slabs(self.context, extents_of(self.context, whole_tile))
        with self._tiles() as grid:
            if slabs is None:
                with self._block(TILE, grid) as place:
                    self._results(self._stream(place), place)
                return
            with self._part(TILE, grid) as (place, cta):
                slabs.fill(self._stream(place, cta), cta)
            if not self.context.tiles.in_memory:
                with self._part(MERGE, grid) as (place, cta):
                    self._merge({**place, PARTS: cta}, slabs)
                return
        # Behind all tiles: a kernel of its own.
        with self._tiles() as grid, self._block(MERGE, grid) as place:
            self._merge(place, slabs)

    @contextmanager
    def _tiles(self) -> Iterator[dict[str, Any]]:
        """Loops over all tiles, with their extents."""
        with ExitStack() as stack:
            yield {
                name: (stack.enter_context(loop(name, extent)), extent)
                for name, extent in self._grid().items()
            }

    def _merge(self, place: dict[str, Any], slabs: Slabs) -> None:
        """Merge the states of a tile, and write its outputs."""
        merge = Merge(BlockBuilder(self.context, extents_of(self.context, place), "merged_"), slabs)
        merge.run()
        self._results(merge, place)

    @contextmanager
    def _part(self, name: str, grid: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
        """A block for each CTA that shares a tile; yields which tile, and which CTA."""
        with ExitStack() as stack:
            cta = stack.enter_context(loop(PARTS, self.cluster))
            loops = {**grid, PARTS: (cta, self.cluster)}
            place = stack.enter_context(self._block(name, loops))
            yield place, place.pop(PARTS)

    @contextmanager
    def _block(self, name: str, loops: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A block for each tile; yields which one it is."""
        with ir.script.sblock(name):
            yield {
                each: spatial(f"v_{each}", extent, variable)
                for each, (variable, extent) in loops.items()
            }

    def _stream(self, place: dict[str, Any], cta: Any = None) -> Stream:
        """The state of a tile, of all the axis or of a CTA's part of it."""
        stream = Stream(BlockBuilder(self.context, extents_of(self.context, place)))
        self._axis(stream, whole(0))
        stream.begin()
        first, count = self._needed(stream, place)
        if cta is not None:
            first, count = part_of(first, count, cta, self.cluster)
        with loop(STEPS, count) as t:
            self._axis(stream, (first + t) * self.context.tiles.elements)
            stream.step()
        self._axis(stream, whole(0))  # the only tile, where outputs go along the axis
        return stream

    def _results(self, state: State, place: dict[str, Any]) -> None:
        Results(state, place).write()

    def _grid(self) -> dict[str, int]:
        """Loops over tiles: rows that do not share right operands, tiles of rows, of columns."""
        context, rows = self.context, self.context.rows
        found = {}
        for var in context.site.rows:
            if not var.same_as(rows.var):
                found[str(var.name)] = int(context.site.extents[var])
            elif rows.group is not None:
                found[str(rows.group.name)] = rows.groups
        return {**found, COLUMNS: context.column_tiles, ROWS: context.row_tiles}

    def _axis(self, stream: Stream, base: Any) -> None:
        context, size = self.context, self.context.tiles.elements
        limit = context.length if context.length % size else None
        stream.builder.extents[context.site.axis] = Extent(
            "j", context.count * size, size, base, limit
        )

    def _needed(self, stream: Stream, place: dict[str, Any]) -> tuple[Any, Any]:
        """The first tile of the axis that rows of the tile need, and how many: one at least."""
        context, size = self.context, self.context.tiles.elements
        box, values = self._box(stream.builder)
        found = span(context.slots, context.index, box)
        first = sympy.Max(0, *(sympy.floor(each / size) for each in found.lower))
        first = sympy.Min(first, context.count - 1)  # one tile at least, if only to be masked
        behind = sympy.Min(context.count, *(sympy.floor(each / size) + 1 for each in found.upper))
        known = ir.sym.Analyzer()
        for each, extent in self._grid().items():
            known.bind(place[each], ir.tvm.ir.Range(0, extent))
        start = known.simplify(to_tir(first, values, "int32"))
        count = known.simplify(to_tir(sympy.Max(1, behind - first), values, "int32"))
        return start, count

    def _box(
        self, builder: BlockBuilder
    ) -> tuple[dict[sympy.Symbol, Any], dict[sympy.Symbol, Any]]:
        """Least and largest values of indices in a tile.

        Values in tensors are unknown here: a kernel must know its loops before it loads anything.
        """
        box: dict[sympy.Symbol, Any] = {}
        values: dict[sympy.Symbol, Any] = {}
        place = {var: each.base for var, each in builder.extents.items()}
        rows = self.context.rows.var
        last = builder.extents[rows].base + (self.context.tiles.rows - 1)
        limit = builder.extents[rows].limit
        last = last if limit is None else ir.tirx.min(last, limit - 1)
        for symbol in self.context.site.cascade.invariants:
            read = self.context.read(symbol)
            if not symbol.is_integer or symbol in self.context.columned:
                continue
            least = sympy.Symbol(f"{symbol.name}_least", integer=True)
            values[least] = builder.read(read, place)
            if read.same_as(rows):
                most = sympy.Symbol(f"{symbol.name}_most", integer=True)
                values[most] = last
                box[symbol] = (least, most)
            elif not mentions([read], rows) and not ir.buffer_loads(read):
                box[symbol] = (least, least)
        return box, values
