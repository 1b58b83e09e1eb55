"""Groups loads along the axis into tiles of neighbouring elements.

A load whose place in memory steps by one element with the axis is loaded as vectors. Loads of one
tensor that lie side by side and step by their number together, as the three coordinates of a point
do, are loaded as vectors too, together. Others are loaded one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.site import Site

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
