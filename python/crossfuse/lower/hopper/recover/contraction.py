"""Reads a pipelined loop: the tiles it loads, the product it accumulates, and its exchange.

That is of a reduction that a cluster splits, or of the products of a pair of CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isqrt, prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import corrected, is_reduction
from crossfuse.lower.hopper.program.tile import (
    Gather,
    GatheredTile,
    KeptTile,
    Place,
    Tile,
    TileNest,
    WindowTile,
    covers,
    refuse_program,
    tile_nest,
)
from crossfuse.lower.hopper.program.tile_program import (
    Contraction,
    Correction,
    Exchange,
    Product,
)
from crossfuse.lower.tree import is_call
from crossfuse.markers import CONSTANT, DSM_SCOPE, STAGES

# Corrections: what a product multiplies its sums by where a chunk of the reduction begins.


def read_correction(nest: TileNest) -> Correction | None:
    """Read what a product multiplies its sums by before it adds to them; None if it only adds.

    The one form that is read is ``C[i, j] = C[i, j] * (F[k // c, i] if k % c == 0 else 1) + A[i, k]
    * B[j, k]``; any other factor is refused.
    """
    body = nest.block.body
    found = corrected(body)
    if found is None:
        return None
    _, factor = found
    row = body.indices[-2]
    (element,) = [each.var for each in nest.block.iter_vars if is_reduction(each)]
    load = getattr(factor, "true_value", None)
    if isinstance(load, ir.TensorLoad) and len(load.indices) == 2:
        chunk = ir.constant(getattr(load.indices[0], "b", 0)) or 0
        place = [ir.tirx.floordiv(element, chunk), row] if chunk else []
        first = ir.tirx.EQ(ir.tirx.floormod(element, chunk), 0) if chunk else None
        one = ir.tirx.const(1.0, "float32")
        wanted = ir.tirx.Select(first, load.source[tuple(place)], one) if chunk else None
        if wanted is not None and ir.tvm_ffi.structural_equal(wanted, factor):
            return Correction(load.source, chunk)
    raise refuse_program(
        nest.where,
        f"sums that are multiplied by {factor}",
        "a factor of the row where a chunk of the reduction begins: "
        "Select(k % chunk == 0, factors[k // chunk, i], 1)",
    )


# Windows of a convolution, read off the copy that stages them in shared memory.


def read_window(nest: TileNest) -> WindowTile | None:
    """Read a copy to shared memory as a tile of the matrix of windows; None if it reads no images.

    For each pixel of the window, the condition must hold where the image has that pixel and nowhere
    else, and the indices must be the pixel's: what is read is the window, whatever the expressions
    look like. Images that are read in another way are refused.
    """
    body = nest.block.body
    condition, load = _parts(body.value)
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 4 or len(body.indices) != 2:
        return None
    tile = _candidate(nest, load.source) if ir.is_global(load.source) else None
    if tile is None or not all(
        _is_pixel(nest, tile, tap, condition, load.indices)
        for tap in product(range(tile.window), range(tile.window))
    ):
        raise refuse_program(
            nest.where,
            f"elements {list(load.indices)} of '{load.source.name}'",
            "the pixels of a window of odd extent around each pixel, row by row, with step 1 and "
            "zeros beyond the image",
        )
    return tile


def _parts(value: Any) -> tuple[Any, Any]:
    """When an element is read, and the load of it, which is None unless it is zero elsewhere."""
    if not is_call(value, ir.IF_THEN_ELSE):
        return ir.tirx.IntImm("bool", 1), value
    condition, load, otherwise = value.args
    return condition, load if is_zero(otherwise) else None


def _candidate(nest: TileNest, images: Any) -> WindowTile | None:
    """The windows that fill the staging buffer exactly; None if none of odd extent does."""
    buffer = nest.block.body.buffer
    rows, columns = (int(each) for each in buffer.ty.shape)
    window = isqrt(columns // int(images.ty.shape[3]))
    matrix = nest.tile(buffer, nest.block.body.indices)
    tile = WindowTile(images, matrix.origin, matrix.shape, window)
    return tile if window % 2 and tile.extents == (rows, columns) else None


def _is_pixel(
    nest: TileNest, tile: WindowTile, tap: tuple[int, int], condition: Any, indices: Any
) -> bool:
    """Whether pixel `tap` of every window is read where the image has it, and zero elsewhere."""
    _, height, width, channels = tile.images
    row, column = nest.block.body.indices
    image, y, x, channel = names = [ir.Var(name, str(row.ty)) for name in ("n", "y", "x", "c")]
    values = {
        row: (image * height + y) * width + x,
        column: (tap[0] * tile.window + tap[1]) * channels + channel,
    }
    condition, *read = (ir.substitute(each, values) for each in (condition, *indices))
    down, across = (each - tile.window // 2 for each in tap)
    wanted = (image, y + down, x + across, channel)
    everywhere = [(0, extent) for extent in tile.images]
    # Pixels whose neighbour lies within the image, and those whose neighbour does not.
    inside, beyond = [*everywhere], []
    for axis, step in ((1, down), (2, across)):
        extent = tile.images[axis]
        first, last = min(max(0, -step), extent), max(min(extent, extent - step), 0)
        inside[axis] = (first, last)
        for outside in ((0, first), (last, extent)):
            beyond.append([*everywhere[:axis], outside, *everywhere[axis + 1 :]])
    if not all(_is_false(_analyzer(names, each), condition) for each in beyond):
        return False
    within = _analyzer(names, inside)
    if within is None:
        return True
    same = zip(read, wanted, strict=True)
    always = all(within.can_prove(each) for each in ir.terms(condition))
    return always and all(within.can_prove_equal(a, b) for a, b in same)


def _analyzer(names: list[Any], ranges: list[tuple[int, int]]) -> Any:
    """An analyzer that knows the half-open ranges of variables; None if one of them is empty."""
    if any(last <= first for first, last in ranges):
        return None
    both = zip(names, ranges, strict=True)
    return ir.ranged(*((name, first, last - first) for name, (first, last) in both))


def _is_false(known: Any, condition: Any) -> bool:
    """Whether a condition provably never holds; trivially so where the variables have no values."""
    return known is None or any(
        known.can_prove(ir.tirx.Not(each)) for each in ir.terms(known.simplify(condition))
    )


def read_contraction(
    loop: Any, outer: tuple[Any, ...], takes: Gather | KeptTile | None = None
) -> Contraction:
    """Read one pipelined loop, the main loop of a GEMM, as a contraction with one product.

    Its body must load both operands and multiply what the same step has loaded. With `takes`, the
    left operand is in shared memory (`Gather`) or in registers (`KeptTile`) before the loop starts,
    so the loop loads the right one alone.
    """
    nests = [tile_nest(each, (*outer, loop)) for each in ir.sequence(loop.body)]
    steps, stages = ir.constant(loop.extent), ir.constant(loop.annotations[STAGES])
    loaded = 2 if takes is None else 1
    if len(nests) != loaded + 1 or steps is None or stages is None or ir.constant(loop.min) != 0:
        raise refuse_program(
            f"loop '{loop.loop_var.name}'",
            f"{len(nests)} nests in {loop.extent} steps",
            f"{loaded} loads and a product in a constant number of steps",
        )
    *copies, product = nests
    loads = dict(_load(each) for each in copies)
    left, right, transposed = _operands(product, takes)
    if takes is not None:
        loads[left.buffer] = left
    for operand in (left, right):
        tile = loads.get(operand.buffer)
        if tile is None or not covers(tile, operand, product.known):
            raise refuse_program(
                product.where, f"operand '{operand.buffer.name}'", "tiles that the same step loads"
            )
        loads[operand.buffer] = replace(tile, shape=operand.shape)
    made = Product(loads[right.buffer], transposed, product.block.body.buffer)
    constant = CONSTANT in loop.annotations
    contraction = Contraction(loop.loop_var, steps, stages, loads[left.buffer], (made,), constant)
    contraction = replace(contraction, correction=read_correction(product))
    if isinstance(takes, Gather):
        contraction = replace(contraction, offset=_offset(contraction))
    _check_accumulator(product, contraction)
    _check_steps(product, contraction)
    return contraction


def _check_accumulator(nest: TileNest, contraction: Contraction) -> None:
    """Refuse sums that are not float32 in registers, at their row and column, and zero at first."""
    body, init = nest.block.body, nest.block.init
    kind = (str(body.buffer.scope()), str(body.buffer.ty.dtype))
    if kind != ("local", "float32"):
        raise refuse_program(
            nest.where, f"sums of {kind[1]} in scope {kind[0]}", "float32 in scope local"
        )
    tile = nest.tile(body.buffer, body.indices[-2:])
    wanted = contraction.result(body.buffer)
    same = all(
        nest.known.can_prove_equal(a, b) for a, b in zip(tile.origin, wanted.origin, strict=True)
    )
    if not same or not same_indices(init.indices, body.indices):
        raise refuse_program(
            nest.where,
            f"sums at {[nest.placed(each) for each in body.indices]}",
            "sums at the row of A and the column of B, from zero at the same place",
        )


def _check_steps(nest: TileNest, contraction: Contraction) -> None:
    """Refuse a loop whose step s does not multiply elements from s * depth on, of both operands."""
    product = contraction.products[0]
    left = contraction.left.origin[1]
    right = product.right.origin[0 if product.is_transposed else 1]
    first = first_of_reduction(contraction)
    known, depth = nest.known, contraction.depth
    regular = known.can_prove_equal(left, first + contraction.step * depth)
    if not regular or not known.can_prove_equal(left + contraction.offset, right):
        raise refuse_program(
            nest.where,
            f"elements {left} of A and {right} of B in step '{contraction.step.name}'",
            f"the {depth} elements of that step, of both",
        )


def _offset(contraction: Contraction) -> Any:
    """How far behind the columns of the left tensor the rows of the right one are, in step 0."""
    product = contraction.products[0]
    right = product.right.origin[0 if product.is_transposed else 1]
    difference = right - contraction.left.origin[1]
    return ir.sym.Analyzer().simplify(ir.at_zero(difference, contraction.step))


def first_of_reduction(contraction: Contraction) -> Any:
    """The element of the reduction that step 0 begins with."""
    return ir.at_zero(contraction.left.origin[1], contraction.step)


def check_reduction(contraction: Contraction, place: Place | None) -> None:
    """Refuse a loop that sums anything but its share of the reduction.

    `place` is the cluster axis whose CTAs each sum a part (split-K); None if each CTA sums all.
    """
    share, parts = (0, 1) if place is None else (place.var, place.extent)
    known = ir.ranged(*([] if place is None else [(place.var, 0, place.extent)]))
    elements = contraction.steps * contraction.depth
    first, extent = first_of_reduction(contraction), contraction.left.extents[1]
    if not known.can_prove_equal(first, share * elements) or elements * parts < extent:
        raise refuse_program(
            f"loop '{contraction.step.name}'",
            f"{elements} elements of the reduction from {first}",
            f"all {extent}" if parts == 1 else f"part {share} of {parts} of all {extent}",
        )


def _load(nest: TileNest) -> tuple[Any, Tile]:
    """The staging buffer that a copy fills, and the tile of global memory that it holds then."""
    body = nest.block.body
    staged = isinstance(body, ir.BufferStore) and str(body.buffer.scope()).startswith("shared")
    window = read_window(nest) if staged else None
    if window is not None:
        return body.buffer, window
    plain = (
        staged
        and isinstance(body.value, ir.TensorLoad)
        and ir.is_global(body.value.source)
        and ir.are_same(body.indices, body.value.indices)
    )
    if not plain:
        raise refuse_program(
            nest.where, "a statement that is no plain copy", "copies from global to shared memory"
        )
    return body.buffer, nest.tile(body.value.source, body.value.indices)


def _operands(nest: TileNest, takes: Gather | KeptTile | None) -> tuple[Tile, Tile, bool]:
    """Left and right operand of a product block, and whether the right one is [k, n]."""
    body, block = nest.block.body, nest.block
    if len(nest.loops) != 3 or not isinstance(body, ir.BufferStore) or len(body.indices) < 2:
        raise refuse_program(nest.where, "no product of matrices", "three loops over a tile")
    row, column = (nest.moved(each) for each in body.indices[-2:])
    layouts = {}
    gather = takes if isinstance(takes, Gather) else None
    for factor in map(partial(_viewed, gather), factors(body)):
        layouts[_layout(nest, factor, row, column)] = factor
    left, plain, transposed = (layouts.get(each) for each in ("left", "right", "transposed"))
    right = plain if plain is not None else transposed
    zero = block.init is not None and is_zero(block.init.value)
    if left is None or right is None or not zero or not accumulates(body):
        raise refuse_program(
            nest.where, f"the statement {body.value}", "C[i, j] + A[i, k] * B[j, k], from zero"
        )
    nest.check_predicate(body.buffer)
    first = nest.tile(left.source, left.indices)
    if takes is not None:
        first = _at_hand(nest, first, takes)
    return (
        first,
        nest.tile(right.source, right.indices),
        plain is None,
    )


def _at_hand(nest: TileNest, tile: Tile, takes: Gather | KeptTile) -> Tile:
    """The left tile where it is before the loop starts, so that TMA need not load it."""
    source = takes.whole if isinstance(takes, Gather) else takes.buffer
    if not tile.buffer.same_as(source):
        raise refuse_program(nest.where, f"left operand '{tile.buffer.name}'", f"'{source.name}'")
    if isinstance(takes, Gather):
        return GatheredTile(tile.buffer, tile.origin, tile.shape, takes)
    return KeptTile(tile.buffer, tile.origin, tile.shape)


@dataclass(frozen=True)
class _Element:
    """An element of a matrix that is loaded, in the form of a buffer's load."""

    source: Any
    #: Row and column.
    indices: tuple[Any, ...]


def _viewed(gather: Gather | None, load: Any) -> _Element:
    """A load as an element of a matrix; slices that a cluster gathered lie side by side in one."""
    if gather is not None and load.source.same_as(gather.whole):
        return _Element(load.source, gather.side_by_side(load.indices))
    return _Element(load.source, tuple(load.indices))


def _layout(nest: TileNest, factor: _Element, row: Any, column: Any) -> str:
    """Which operand a factor is, by the loops that its indices follow; empty if neither."""
    if len(factor.indices) != 2 or row is None or column is None:
        return ""
    loops = [nest.moved(each) for each in factor.indices]

    if None in loops:
        return ""
    first, second = (
        "row" if each.same_as(row) else "column" if each.same_as(column) else "reduction"
        for each in loops
    )
    layouts = {
        ("row", "reduction"): "left",
        ("column", "reduction"): "right",
        ("reduction", "column"): "transposed",
    }
    return layouts.get((first, second), "")


def factors(body: Any) -> list[Any]:
    """The two loads that ``C + cast(A) * cast(B)`` multiplies; fewer for any other statement."""
    value = body.value
    term = value.b if isinstance(value, ir.tirx.Add) else None
    if not isinstance(term, ir.tirx.Mul):
        return []
    factors = [each.value if isinstance(each, ir.tirx.Cast) else each for each in (term.a, term.b)]
    return [each for each in factors if isinstance(each, ir.TensorLoad)]


def accumulates(body: Any) -> bool:
    """Whether the statement adds to the element that it stores, corrected or as it is."""
    first = body.value.a if isinstance(body.value, ir.tirx.Add) else None
    found = corrected(body)
    first = first if found is None else found[0]
    return (
        isinstance(first, ir.TensorLoad)
        and first.source.same_as(body.buffer)
        and same_indices(first.indices, body.indices)
    )


def same_indices(one: Any, other: Any) -> bool:
    """Whether two accesses have structurally equal indices."""
    same = ir.tvm_ffi.structural_equal  # as of two loops that are one dimension
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def is_zero(value: Any) -> bool:
    """Whether a value is the floating-point number 0."""
    return isinstance(value, ir.tirx.FloatImm) and float(value.value) == 0


# Reads what CTAs exchange: a reduction split over a cluster, or the products of a pair.


# A reduction that is split over a cluster: partial tiles in slabs, combined in slices.


def read_exchange(
    copy: TileNest, combine: TileNest, contraction: Contraction, place: Place, slice_var: Any
) -> Exchange:
    """Read the two nests of `dsm_reduce`: which slice each CTA combines, and into which buffer.

    `copy` takes the partial tile from registers to the slab of the CTA; `combine` adds the slabs of
    all CTAs along `place`, each CTA over its own slice of the tile. Nests that are not as
    `dsm_reduce` writes them are refused.
    """
    (product,) = contraction.products
    rank = copy.placed(copy.block.body.indices[0])
    if not copy.known.can_prove_equal(rank, place.var):
        raise refuse_program(copy.where, f"slab {rank}", f"the slab of CTA {place.var}")
    slab, width = _slab(copy, product.accumulator, contraction)
    elements = _slice(combine, slab, contraction, place, slice_var, width)
    return Exchange(place, elements, width, combine.block.body.buffer)


def slice_tile(exchange: Exchange, whole: Tile, slice_var: Any) -> Tile:
    """A CTA's slice as a tile of the output: whole rows, or an equal part of one.

    Slices of any other shape are refused.
    """
    row, column = whole.origin
    if exchange.rows:
        origin = (row + slice_var * exchange.rows, column)
        return Tile(whole.buffer, origin, (exchange.rows, whole.shape[1]))
    if exchange.width % exchange.elements:
        raise refuse_program(
            f"axis {exchange.place.tag}",
            f"slices of {exchange.elements} elements of rows of {exchange.width}",
            "whole rows, or equal parts of a row",
        )
    first = slice_var * exchange.elements
    origin = (
        row + ir.tirx.floordiv(first, exchange.width),
        column + ir.tirx.floormod(first, exchange.width),
    )
    return Tile(whole.buffer, origin, (1, exchange.elements))


def _slab(nest: TileNest, accumulator: Any, contraction: Contraction) -> tuple[Any, int]:
    """The slabs that a copy of the whole tile fills, and the width of the tile in them."""
    body = nest.block.body
    plain = (
        isinstance(body, ir.BufferStore)
        and isinstance(body.value, ir.TensorLoad)
        and body.value.source.same_as(accumulator)
        and str(body.buffer.scope()) == DSM_SCOPE
        and ir.are_same(body.indices, body.value.indices)
    )
    shape, wanted = [0, 0], (contraction.rows, contraction.columns)
    if plain:
        loops = [nest.moved(each) for each in body.indices[-2:]]
        shape = [1 if each is None else int(each.extent) for each in loops]
        limits = [int(each) for each in list(body.buffer.ty.shape)[-2:]]
        plain = all(
            has in (size, limit) for has, size, limit in zip(shape, wanted, limits, strict=True)
        )
    if not plain:
        raise refuse_program(
            nest.where,
            "no copy of the partial tile to a slab",
            "the partial tile in scope shared.dsm",
        )
    return body.buffer, shape[1]


def _slice(
    nest: TileNest,
    slab: Any,
    contraction: Contraction,
    place: Place,
    slice_var: Any,
    width: int,
) -> int:
    """Elements of a slice, after a check that slices follow each other, row by row."""
    body = nest.block.body
    elements, ranks = _combined(nest, slab, place)
    count = prod(int(each.extent) for each in elements)
    row, column = _in_slice(elements, slice_var, count, width)
    origin = contraction.result(slab).origin
    wanted = (origin[0] + row, origin[1] + column)
    here = all(
        nest.known.can_prove_equal(nest.placed(index), value)
        for index, value in zip(body.indices, wanted, strict=True)
    )
    whole = len(elements) < 2 or int(elements[1].extent) == width
    if not here or not whole or int(ranks.extent) != place.extent:
        raise refuse_program(
            nest.where,
            f"slices of {count} elements, at {nest.placed(body.indices[0])}",
            f"slices that follow each other in rows of {width} elements",
        )
    if count * place.extent > contraction.rows * width:
        raise refuse_program(
            nest.where,
            f"{place.extent} slices of {count} elements",
            f"slices of the {contraction.rows * width} elements of a tile",
        )
    nest.check_predicate(body.buffer)
    return count


def _in_slice(elements: list[Any], slice_var: Any, count: int, width: int) -> tuple[Any, Any]:
    """Row and column in the tile of an element of a slice: of whole rows, or counted row by row."""
    if len(elements) == 2:
        row, column = elements
        return slice_var * int(row.extent) + row.loop_var, column.loop_var
    position = slice_var * count + (elements[0].loop_var if elements else 0)
    return ir.tirx.floordiv(position, width), ir.tirx.floormod(position, width)


def _combined(nest: TileNest, slab: Any, place: Place) -> tuple[list[Any], Any]:
    """Loops over the elements of a slice, or its rows and columns, and the loop over the ranks."""
    body = nest.block.body
    value = body.value if isinstance(body, ir.BufferStore) else None
    loads = [value.a, value.b] if isinstance(value, ir.tirx.Add) else []
    sums = (
        len(loads) == 2
        and all(isinstance(each, ir.TensorLoad) for each in loads)
        and accumulates(body)
        and loads[1].source.same_as(slab)
        and ir.are_same(loads[1].indices[1:], body.indices)
    )
    if not sums or len(nest.loops) > 3:
        raise refuse_program(
            nest.where, f"the statement {value}", "C[i, j] + slab[rank, i, j] over ranks"
        )
    ranks = nest.moved(loads[1].indices[0])
    elements = [each for each in nest.loops if ranks is None or not each.same_as(ranks)]
    if ranks is None or len(elements) > 2:
        raise refuse_program(
            nest.where, "no loop over ranks", f"a sum over the {place.extent} slabs"
        )
    return elements, ranks
