"""Writes a cascade with products as a stream over tiles, and its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.expressions.tir import to_tir
from crossfuse.cascade.rewrite.phases import hoisted, is_risky, moderate
from crossfuse.cascade.rewrite.scripting import loop, spatial, symbol_of
from crossfuse.cascade.rewrite.tiled.skipping import span
from crossfuse.cascade.rewrite.tiled.state import (
    BlockBuilder,
    Local,
    Merge,
    Slabs,
    State,
    dealt_to,
    part_of,
)
from crossfuse.cascade.rewrite.tiled.steps import is_linear, rebuilt
from crossfuse.cascade.rewrite.tiled.stream import Stream
from crossfuse.cascade.rewrite.tiled.tile_context import (
    COLUMNS,
    PARTS,
    ROWS,
    STEPS,
    Extent,
    TileContext,
    extents_of,
    tile_context,
    whole,
)
from crossfuse.cascade.rewrite.tiles import CascadeTiles, tiles_refused
from crossfuse.cascade.spec import Derivation, OutputSite, Site, guarded, new, position, value


class Results:
    """Writes the outputs of a tile, whose place is as in `extents_of`."""

    def __init__(self, state: State, place: dict[str, Any]) -> None:
        self.state = state
        self.builder = state.builder
        self.context = state.context
        self.place = place

    def write(self) -> None:
        """Write all outputs."""
        derivation = self.context.derivation
        expressions = {**derivation.results, **derivation.rows}
        self.state.finish({each for one in expressions.values() for each in one.free_symbols})
        for number, output in enumerate(self.context.site.outputs):
            along = output.name in derivation.rows
            if along and (self.context.count > 1 or self.context.tiles.cluster > 1):
                raise tiles_refused(
                    f"output {output.name}",
                    f"numbers of each element, in {self.context.count} tiles of the axis",
                    "one tile, which is still there when the state is finished",
                    f"pass elements={self.context.length}, or write it as a stream of threads",
                )
            self._output(output, expressions[output.name], number, along)

    def _output(self, output: OutputSite, expression: sympy.Expr, number: int, along: bool) -> None:
        over = [*self.context.site.rows, *([self.context.site.axis] if along else [])]
        for var in output.columns:
            if var not in self.builder.extents:
                extent = int(self.context.site.extents[var])
                self.builder.extents[var] = Extent("c", extent, extent, whole(0))
            over.append(var)
        expression = self._unguarded(expression)
        ranked = self._ranked(expression)
        if ranked:
            # Of one element there is no loop over ranks.
            self._rank(ranked, output.columns[-1] if output.columns else whole(0))
        left = expression if along or ranked else self._scaled(expression, f"out{number}_scale")
        name = f"{output.name}_store"
        with self.builder.block(name, over, stores=self._first(output)) as at:
            dtype = output.dtype
            made = self.builder.write(left, at, dtype if "int" in dtype else "")
            if str(made.ty) != dtype:
                made = made.astype(dtype)
            ir.script.buffer_store(
                output.buffer, made, [self.builder.read(each, at) for each in output.indices]
            )

    def _first(self, output: OutputSite) -> list[Any]:
        """Conditions on tile and slice: only the first ones store outputs without columns."""
        context, found = self.context, []
        for var, name in ((context.column, COLUMNS), (context.sliced, PARTS)):
            own = var is not None and any(each.same_as(var) for each in output.columns)
            if name in self.place and not own and (var is not None or name == PARTS):
                found.append(ir.tirx.EQ(self.place[name], 0))
        return found

    def _unguarded(self, expression: sympy.Expr) -> sympy.Expr:
        """Expand what stands in for elements of selections: each element has its own."""
        images = {
            guarded(each.name): rebuilt(each.guard, {new(each.name): value(each.name)}.get)
            for each in self.context.slots
            if each.name in self.state.selections and each.guard is not None
        }
        return rebuilt(expression, images.get)

    def _ranked(self, expression: sympy.Expr) -> list[str]:
        found = []
        for slot in self.context.slots:
            own = {value(slot.name), position(slot.name)}
            if slot.name in self.state.selections and expression.free_symbols & own:
                found.append(slot.name)
        return found

    def _rank(self, names: Sequence[str], var: Any) -> None:
        """Point the symbols of selections at the rank that the last column of an output counts."""
        for name in names:
            selection = self.state.selections[name]
            over = self.state.places_of(selection.slot)
            rank = var if selection.slot.monoid.k else whole(0)
            for symbol, local in (
                (value(name), selection.values),
                (position(name), selection.places),
            ):
                self.builder.symbols[symbol] = Local(local.buffer, (*over, rank))

    def _scaled(self, expression: sympy.Expr, name: str) -> sympy.Expr:
        """Hoist the parts of an output that are the same for a row."""
        columned = [each for each in self.context.slots if self.context.columns_of(each)]
        changing = {value(each.name) for each in columned} | self.context.columned
        own = [value(e.name) for e in columned if value(e.name) in expression.free_symbols]
        if not own:
            return expression
        slots = self.context.derivation.slots
        factor = expression
        risky = any(is_risky(each, moderate(slots)) for each in expression.atoms(sympy.Pow))
        linear = len(own) == 1 and is_linear(expression, own[0]) and not risky
        if linear:
            factor = rebuilt(expression, lambda each: sympy.S.One if each == own[0] else None)
        fixed, left = hoisted(factor, changing, slots)
        for place, (symbol, each) in enumerate(fixed):
            self._once(symbol, each, f"{name}{place}")
        return own[0] * left if linear else left

    def _once(self, symbol: sympy.Symbol, expression: sympy.Expr, name: str) -> None:
        rows = self.context.site.rows
        local = self.builder.local(name, rows, self.context.dtype)
        with self.builder.block(f"{name}_make", rows) as at:
            local.store(at, self.builder.write(expression, at))
        self.builder.symbols[symbol] = local


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
                    Results(self._stream(place), place).write()
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
        with ExitStack() as stack:
            yield {
                name: (stack.enter_context(loop(name, extent)), extent)
                for name, extent in self._grid().items()
            }

    def _merge(self, place: dict[str, Any], slabs: Slabs) -> None:
        merge = Merge(BlockBuilder(self.context, extents_of(self.context, place), "merged_"), slabs)
        merge.run()
        Results(merge, place).write()

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
        stride = 1
        if cta is not None and self.context.masks_by_key:
            # A kernel passes by tiles that no row sees: all CTAs have as many that rows see.
            stride = self.cluster
            first, count = dealt_to(first, count, cta, self.cluster)
        elif cta is not None:
            first, count = part_of(first, count, cta, self.cluster)
        with loop(STEPS, count) as t:
            self._axis(stream, (first + t * stride) * self.context.tiles.elements)
            stream.step()
        self._axis(stream, whole(0))  # the only tile, where outputs go along the axis
        return stream

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
