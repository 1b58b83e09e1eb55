"""Shared by all blocks of a rewritten function: the cascade in its function, sizes, symbols.

For a stream of threads the axis is cut into slices, one for each CTA of a cluster. The threads of a
CTA stand side by side over it, each with a vector of neighbours, and step along::

    element = cta * slice + (step * threads + thread) * vector + lane

Several steps make a tile. Tiles that lie within the axis for all threads come first and need no
conditions; the others, a short rest, are guarded vector by vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.rewrite.phases import Definitions
from crossfuse.cascade.rewrite.scripting import Scratch, numbers
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.spec import Derivation, Site, Slot, check_exact, guarded, new, old, value

# Groups loads along the axis into tiles of neighbouring elements.
#
# A load whose place in memory steps by one element with the axis is loaded as vectors. Loads of one
# tensor that lie side by side and step by their number together, as the three coordinates of a
# point do, are loaded as vectors too, together. Others are loaded one by one.


#: Bytes of a load.
BYTES = 16
#: Most loads that are combined to one stream.
_TOGETHER = 8


@dataclass(frozen=True, eq=False)
class Stream:
    """Loads of one tensor along the axis."""

    #: For blocks and buffers.
    name: str
    #: A parameter of the function.
    buffer: Any
    #: Side by side where there are several.
    loads: tuple[Any, ...]
    #: Elements of the axis that a thread has side by side.
    vector: int
    #: Elements of one vector load, 1 for loads one by one.
    lanes: int
    #: Dimensions of the tensor beyond which a load may lie: conditions guard the use of such
    #: elements, but a tile is loaded before conditions are evaluated.
    unproved: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Elements of the tensor for one element of the axis."""
        return len(self.loads)

    @property
    def dtype(self) -> str:
        """Type of the tensor's elements."""
        return str(self.buffer.ty.dtype)

    @property
    def elements(self) -> int:
        """Elements of the tensor for a vector of the axis."""
        return self.vector * self.width

    def indices(self, first: Any, number: Any, axis: Any) -> list[Any]:
        """Indices in the tensor of an element of a tile, by its number in the tile.

        `first` is the index along the axis of the tile's first element, and `axis` the variable
        that loads are written over.
        """
        step = number if self.width == 1 else ir.tirx.floordiv(number, self.width)
        places = [
            ir.substitute(each, lambda var: first + step if var.same_as(axis) else var)
            for each in self.loads[0].indices
        ]
        if self.width > 1:
            places[-1] = places[-1] + ir.tirx.floormod(number, self.width)
        return places

    def inside(self, indices: Sequence[Any]) -> list[Any]:
        """Conditions under which a place lies within the tensor; none where it always does."""
        shape = self.buffer.ty.shape
        found = []
        for each in self.unproved:
            found += [indices[each] >= 0, indices[each] < shape[each]]
        return found

    def same(self, other: Stream) -> bool:
        """Whether another stream is of the same loads."""
        return (
            self.buffer.same_as(other.buffer)
            and self.width == other.width
            and all(other.place(each) is not None for each in self.loads)
        )

    def place(self, load: Any) -> int | None:
        """Index of a load among the stream's loads; None for that of another stream."""
        same = ir.tvm_ffi.structural_equal
        found = (i for i, each in enumerate(self.loads) if same(each, load))
        return next(found, None)


def vector_of(site: Site, symbols: Iterable[sympy.Symbol]) -> int:
    """Adjacent elements of a thread such that the narrowest type is loaded by 16 bytes.

    It is a power of two that divides the axis.
    """
    loads = [each for symbol in symbols for each in _along(site, symbol)]
    wide = max((BYTES // ir.item_bytes(each.source.ty.dtype) for each in loads), default=1)
    return gcd(wide, site.extents[site.axis])


def streams(site: Site, symbols: Iterable[sympy.Symbol], vector: int) -> tuple[Stream, ...]:
    """Group the loads of symbols along the axis.

    A thread has `vector` elements side by side, the first of which is a multiple of that.
    """
    found: list[list[Any]] = []
    for symbol in symbols:
        for load in _along(site, symbol):
            _add(found, load, site)
    made: list[Stream] = []
    for number, group in enumerate(found):
        safe = not any(_unproved(each, site) for each in group)
        whole = safe and _is_whole(group, site)
        for part, loads in enumerate([tuple(group)] if whole else [(each,) for each in group]):
            suffix = f"{number}" if part == 0 else f"{number}_{part}"
            unproved = _unproved(loads[0], site)
            lanes = 1 if unproved else _lanes(loads, site, vector)
            name = f"{loads[0].source.name}_{suffix}"
            made.append(Stream(name, loads[0].source, loads, vector, lanes, unproved))
    return tuple(made)


def read_by(
    site: Site, symbols: Iterable[sympy.Symbol], found: Iterable[Stream]
) -> tuple[Stream, ...]:
    """Streams of which some symbols read elements."""
    loads = [each for symbol in symbols for each in _along(site, symbol)]
    return tuple(s for s in found if any(s.place(each) is not None for each in loads))


def with_tiles(
    site: Site, symbol: sympy.Symbol, tiles: Mapping[Stream, Callable[[Any], Any]], lane: Any
) -> Any:
    """The expression of a symbol over rows and the axis, with its loads along the axis from tiles.

    `tiles` gives the element of a stream's tile at a place; `lane` is which of the neighbours.
    """

    def take(load: Any, mutator: Any) -> Any:
        for stream, tile in tiles.items():
            place = stream.place(load)
            if place is not None:
                return tile(lane * stream.width + place)
        return mutator.default_mutate(load)

    return ir.mutate(site.reads[symbol], (ir.TensorLoad, take))


def _along(site: Site, symbol: sympy.Symbol) -> list[Any]:
    found: list[Any] = []

    def visit(load: Any) -> None:
        if mentions(load.indices, site.axis) and ir.is_buffer_var(load.source):
            found.append(load)

    ir.walk(site.reads[symbol], (ir.TensorLoad, visit))
    return found


def _add(found: list[list[Any]], load: Any, site: Site) -> None:
    """Add a load to the group of its neighbours in the same tensor, or to a new group."""
    known = ir.sym.Analyzer()
    for group in found:
        if not group[0].source.same_as(load.source):
            continue
        if any(ir.tvm_ffi.structural_equal(each, load) for each in group):
            return
        apart = ir.constant(known.simplify(_flat(load) - _flat(group[0])))
        if apart is not None and abs(apart) < _TOGETHER:
            group.append(load)
            return
    found.append([load])


def _unproved(load: Any, site: Site) -> tuple[int, ...]:
    """Dimensions in which a load is not proved to lie within its tensor."""
    known = ir.sym.Analyzer()
    for var, extent in site.extents.items():
        known.bind(var, ir.tvm.ir.Range(0, int(extent)))
    return tuple(
        number
        for number, (index, extent) in enumerate(
            zip(load.indices, load.source.ty.shape, strict=True)
        )
        if not known.can_prove(ir.tirx.And(index >= 0, index < extent))
    )


def _is_whole(group: list[Any], site: Site) -> bool:
    """Sort loads, and say whether they fill what they step over."""
    known = ir.sym.Analyzer()
    one = group[0]
    group.sort(key=lambda each: ir.constant(known.simplify(_flat(each) - _flat(one))) or 0)
    places = [
        [
            ir.constant(known.simplify(i - j))
            for i, j in zip(each.indices, group[0].indices, strict=True)
        ]
        for each in group
    ]
    wanted = [[*([0] * (len(each.indices) - 1)), i] for i, each in enumerate(group)]
    return places == wanted and _step(group[0], site) == len(group)


def _lanes(loads: tuple[Any, ...], site: Site, vector: int) -> int:
    """Elements of one vector load that is aligned for every row and thread."""
    width = len(loads)
    # CUDA has no vectors of flags: TVM refuses long ones, and takes two bytes a flag of short ones.
    if _step(loads[0], site) != width or str(loads[0].source.ty.dtype) == "bool":
        return 1
    known = ir.sym.Analyzer()
    start = ir.substitute(
        _flat(loads[0]),
        lambda var: ir.tirx.IntImm(str(var.ty), 0) if var.same_as(site.axis) else var,
    )
    modular = known.modular_set(known.simplify(start))
    common = gcd(int(modular.coeff), int(modular.base), width * vector)
    return gcd(common, BYTES // ir.item_bytes(loads[0].source.ty.dtype))


def _step(load: Any, site: Site) -> int | None:
    """How far a load moves with the axis, in elements; None if not evenly."""
    terms = ir.sym.detect_linear_equation(_flat(load), [site.axis])
    return ir.constant(ir.sym.Analyzer().simplify(terms[0])) if terms else None


def _flat(load: Any) -> Any:
    return row_major(list(load.indices), load.source.ty.shape)


@dataclass(frozen=True)
class Tiling:
    """Tiles of one kind: all whole, or all guarded."""

    #: Step at which the first tile begins.
    first: int
    #: Number of tiles.
    count: int
    #: Steps of each tile.
    steps: int
    #: Whether steps may lie beyond the axis.
    guarded: bool


@dataclass(frozen=True)
class ThreadMapping:
    """How the axis is divided among CTAs and threads."""

    #: Elements of the axis.
    length: int
    #: This and the rest as in `StreamTiles`; the vector divides the length.
    threads: int
    vector: int
    unroll: int
    cluster: int

    @property
    def stride(self) -> int:
        """Elements that the threads of a CTA take in at a step."""
        return self.threads * self.vector

    @property
    def steps(self) -> int:
        """Steps of every CTA."""
        return -(-self.length // (self.cluster * self.stride))

    @property
    def slice(self) -> int:
        """Elements of a CTA, those beyond the axis included."""
        return self.steps * self.stride

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """Whole tiles, then guarded ones; only those that there are."""
        last = max(0, self.length - (self.cluster - 1) * self.slice)
        whole = last // (self.unroll * self.stride)
        begun = whole * self.unroll
        found = [Tiling(0, whole, self.unroll, False)] if whole else []
        rest = self.steps - begun
        if rest and rest <= self.unroll and last == self.slice and self.length % self.slice == 0:
            return (*found, Tiling(begun, 1, rest, False))
        full, short = divmod(rest, self.unroll)
        if full:
            found.append(Tiling(begun, full, self.unroll, True))
        if short:
            # Of its own: a tile beyond the CTA's slice would be that of the next one.
            found.append(Tiling(begun + full * self.unroll, 1, short, True))
        return tuple(found)

    @property
    def held(self) -> int:
        """Steps that a thread needs registers for to hold all of its elements."""
        return max(each.first + each.count * each.steps for each in self.tilings)

    def element(self, cta: Any, thread: Any, step: Any, lane: Any = 0) -> Any:
        """Index along the axis."""
        place = cta * self.slice if self.cluster > 1 else 0
        return place + step * self.stride + thread * self.vector + lane

    def inside(self, tiling: Tiling, place: tuple[Any, Any, Any], first: Any, step: Any) -> Any:
        """Condition under which a vector lies within the axis; None where it always does.

        The place is row, CTA and thread; `first` is the tile's first step, and `step` counts from
        it.
        """
        if not tiling.guarded:
            return None
        _, cta, thread = place
        return self.element(cta, thread, first + step) < self.length


@dataclass(frozen=True, eq=False)
class Context:
    """A cascade in its function, and how it streams."""

    site: Site
    derivation: Derivation

    def __post_init__(self) -> None:
        check_exact(self.site)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state, in the order of updates."""
        return self.derivation.slots

    @cached_property
    def dtype(self) -> str:
        """Type of the state and of all arithmetic."""
        dtypes = {each.dtype for each in self.site.stages.values()}
        return "float64" if "float64" in dtypes else "float32"

    @property
    def length(self) -> int:
        """Elements of the axis."""
        return int(self.site.extents[self.site.axis])

    @property
    def row_count(self) -> int:
        """Rows of the cascade."""
        return prod(int(self.site.extents[each]) for each in self.site.rows)


# Contributions in outputs, as a thread computed them.
#
# The softmax of an element is ``exp(x - m) / s``, and ``exp(x - m)`` was its contribution to the
# sum, below the maximum of its thread. What corrects a thread's sum when maxima grow corrects each
# of its terms: held in registers, they are multiplied by it, instead of computed again.


def reusing(derivation: Derivation) -> tuple[Derivation, dict[str, sympy.Symbol]]:
    """Rewrite outputs over contributions that are held, where that spares an exponential.

    The `rows` of the derivation are then over what is held, and slots as a thread has them before
    states merge (`old`). Symbols of what is held come by the slots that it contributes to.
    """
    found: dict[str, sympy.Symbol] = {}
    rows = dict(derivation.rows)
    finished = {new(each.name): value(each.name) for each in derivation.slots}
    before = {value(each.name): old(each.name) for each in derivation.slots}
    for slot in derivation.slots:
        factor = _factor(slot)
        if factor is None or not slot.contribution.has(sympy.exp):
            continue
        kept = sympy.Symbol(f"{slot.name}_kept", real=True)
        again = slot.contribution.xreplace(finished)
        corrected = kept * factor.xreplace(before).xreplace(finished)
        changed = {name: each.xreplace({again: corrected}) for name, each in rows.items()}
        if changed != rows:
            rows, found[slot.name] = changed, kept
    return (replace(derivation, rows=rows) if found else derivation), found


def _factor(slot: Slot) -> sympy.Expr | None:
    """The factor by which a step corrects the state; None for other corrections, or none."""
    if slot.monoid.name != "sum" or not isinstance(slot.carry, sympy.Mul):
        return None
    others = [each for each in slot.carry.args if each != slot.symbol]
    if len(others) + 1 != len(slot.carry.args) or any(
        slot.symbol in e.free_symbols for e in others
    ):
        return None
    return sympy.Mul(*others)


# A stream of threads.


@dataclass(frozen=True, eq=False)
class StreamContext(Context):
    """A cascade whose axis is divided among threads."""

    mapping: ThreadMapping
    #: As in `StreamTiles`.
    resident: str
    #: Contributions that outputs use again, by slot.
    reused: Mapping[str, sympy.Symbol]

    @cached_property
    def swept(self) -> tuple[Stream, ...]:
        """Streams along the axis that the state takes in."""
        return self._streams(each.contribution for each in self.slots)

    @property
    def moving(self) -> tuple[sympy.Symbol, ...]:
        """Symbols that change along the axis."""
        return (*self.site.cascade.elements, *self.reused.values())

    @cached_property
    def emitted(self) -> tuple[Stream, ...]:
        """Streams along the axis that outputs over it use."""
        return self._streams(self.derivation.rows.values())

    @cached_property
    def awaited(self) -> tuple[sympy.Symbol, ...]:
        """Invariants of outputs over the axis that are loads: labels, the gradient of a row's loss.

        Loaded where they are used, behind what CTAs and threads exchange, each costs a CTA the
        latency of memory: of the gradient of cross entropy, 8192 x 131072 in clusters of 8, nearly
        a third of its time.
        """
        used = set().union(*(each.free_symbols for each in self.derivation.rows.values()))
        found = (each for each in self.site.cascade.invariants if each in used)
        return tuple(each for each in found if isinstance(self.site.reads.get(each), ir.TensorLoad))

    def _streams(self, expressions: Iterable[sympy.Expr]) -> tuple[Stream, ...]:
        used = set().union(*(each.free_symbols for each in expressions))
        symbols = [each for each in self.site.cascade.elements if each in used]
        return streams(self.site, symbols, self.mapping.vector)

    def at_row(self, row: Any) -> dict[Any, Any]:
        """Variables of the rows at a row's number."""
        found: dict[Any, Any] = {}
        below = self.row_count
        for each in self.site.rows:
            extent = int(self.site.extents[each])
            below //= extent
            number = ir.tirx.floordiv(row, below) if below > 1 else row
            found[each] = (
                ir.tirx.floormod(number, extent) if below * extent < self.row_count else number
            )
        return found

    def symbols(self, place: Mapping[Any, Any], tiles: Mapping[Stream, Any], lane: Any) -> Any:
        """Values of elements and invariants at a row and an element of the axis."""
        cascade = self.site.cascade
        return {
            symbol: at(with_tiles(self.site, symbol, tiles, lane), place)
            for symbol in (*cascade.elements, *cascade.invariants)
            if symbol in self.site.reads
        }

    def invariants(self, place: Mapping[Any, Any]) -> dict[sympy.Symbol, Any]:
        """Values of invariants at a row, and of the row's first elements."""
        cascade, reads = self.site.cascade, self.site.reads
        found = {each: at(reads[each], place) for each in cascade.invariants if each in reads}
        begin = {**place, self.site.axis: 0}
        return found | {first: at(reads[each], begin) for each, first in cascade.firsts.items()}


def at(expression: Any, place: Mapping[Any, Any]) -> Any:
    """Substitute a place in an expression of the site; integers get the variables' types."""

    def replace(var: Any) -> Any:
        for each, now in place.items():
            if each.same_as(var):
                return now if not isinstance(now, int) else ir.tirx.const(now, str(var.ty))
        return var

    return ir.substitute(expression, replace)


def stream_context(site: Site, derivation: Derivation, tiles: StreamTiles) -> StreamContext:
    """Choose the sizes that `tiles` leaves open."""
    length = int(site.extents[site.axis])
    vector = vector_of(site, site.cascade.elements)
    if tiles.vector:
        vector = tiles.vector if length % tiles.vector == 0 else 1
    mapping = ThreadMapping(length, tiles.threads, vector, tiles.unroll, tiles.cluster)
    reused: dict[str, sympy.Symbol] = {}
    # Threads take in all of their elements at once, and hold them.
    if tiles.resident == "registers" and sum(each.count for each in mapping.tilings) == 1:
        derivation, reused = reusing(derivation)
    return StreamContext(site, derivation, mapping, tiles.resident, reused)


def finished(
    context: StreamContext, values: dict[sympy.Symbol, Any], state: Mapping[str, Any]
) -> Definitions:
    """Define the finished state, and what stands in for its values, in registers."""
    made = Definitions(values, context.dtype)
    for slot in context.slots:
        kept = [
            Scratch(f"{each.name}_final", each.dtype, state[each.name]).value
            for each in numbers(slot, context.dtype)
        ]
        known = kept[0]
        made.values[value(slot.name)] = made.values[guarded(slot.name)] = known
        if slot.monoid.keeps_places:
            made.chosen[slot.name] = kept
        if slot.guard is not None:
            inside = {**made.values, new(slot.name): known}
            stand_in = Definitions(inside, context.dtype).write(slot.guard)
            made.values[guarded(slot.name)] = Scratch(
                f"{slot.name}_usable", context.dtype, stand_in
            ).value
    return made
