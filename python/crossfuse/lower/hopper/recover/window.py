"""Reads the windows of a convolution off the copy that stages them."""

from __future__ import annotations

from itertools import product
from math import isqrt
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.program.window_tile import WindowTile
from crossfuse.lower.tree import is_call


def read_window(nest: TileNest) -> WindowTile | None:
    """Read a copy of windows of images.

    For each pixel of the window, the condition must hold where the image has that pixel and nowhere
    else, and the indices must be the pixel's: what is read is the window, whatever the expressions
    look like.

    Parameters
    ----------
    nest : TileNest
        A nest that stores to shared memory.

    Returns
    -------
    WindowTile | None
        What it copies, as a tile of the matrix of windows; None if it reads no images.

    Raises
    ------
    LoweringRefused
        If it reads images in another way.
    """
    body = nest.block.body
    condition, load = _parts(body.value)
    if not isinstance(load, ir.TensorLoad) or len(load.indices) != 4 or len(body.indices) != 2:
        return None
    tile = _candidate(nest, load.source) if str(load.source.scope()) == "global" else None
    if tile is None or not _is_window(nest, tile, condition, load.indices):
        raise refuse_program(
            nest.where,
            f"elements {list(load.indices)} of '{load.source.name}'",
            "the pixels of a window of odd extent around each pixel, row by row, with step 1 and "
            "zeros beyond the image",
        )
    return tile


def _parts(value: Any) -> tuple[Any, Any]:
    """When an element is read, and the load of it; elsewhere it is zero."""
    if not is_call(value, ir.IF_THEN_ELSE):
        return ir.tirx.IntImm("bool", 1), value
    condition, load, otherwise = value.args
    zero = isinstance(otherwise, ir.tirx.FloatImm) and float(otherwise.value) == 0
    return condition, load if zero else None


def _candidate(nest: TileNest, images: Any) -> WindowTile | None:
    """The windows that the staging buffer has room for."""
    buffer = nest.block.body.buffer
    rows, columns = (int(each) for each in buffer.ty.shape)
    window = isqrt(columns // int(images.ty.shape[3]))
    matrix = nest.tile(buffer, nest.block.body.indices)
    tile = WindowTile(images, matrix.origin, matrix.shape, window)
    return tile if window % 2 and tile.extents == (rows, columns) else None


def _is_window(nest: TileNest, tile: WindowTile, condition: Any, indices: Any) -> bool:
    """Whether all elements are those of the window, pixel by pixel of it."""
    taps = product(range(tile.window), range(tile.window))
    return all(_is_pixel(nest, tile, tap, condition, indices) for tap in taps)


def _is_pixel(
    nest: TileNest, tile: WindowTile, tap: tuple[int, int], condition: Any, indices: Any
) -> bool:
    """Whether pixel `tap` of every window is read as it must be."""
    _, height, width, channels = tile.images
    row, column = nest.block.body.indices
    image, y, x, channel = names = [ir.Var(name, str(row.ty)) for name in ("n", "y", "x", "c")]
    values = {
        row: (image * height + y) * width + x,
        column: (tap[0] * tile.window + tap[1]) * channels + channel,
    }
    condition, *read = (
        ir.substitute(each, lambda var: values.get(var, var)) for each in (condition, *indices)
    )
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
    """An analyzer that knows in which ranges variables are; None if there are no values."""
    known = ir.sym.Analyzer()
    for name, (first, last) in zip(names, ranges, strict=True):
        if last <= first:
            return None
        known.bind(name, ir.tvm.ir.Range(first, last))
    return known


def _is_false(known: Any, condition: Any) -> bool:
    """Whether a condition holds for no values of the variables."""
    return known is None or any(
        known.can_prove(ir.tirx.Not(each)) for each in ir.terms(known.simplify(condition))
    )
