"""All kernels of a cascade and their estimates, whichever family it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np

from crossfuse.cascade.rewrite.tiled.sizes import DSM, CascadeTiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade import rows_space, stream_space, tile_space
from crossfuse.planner.cascade.kernel import CascadeKernel, Tiles
from crossfuse.planner.cascade.rows_space import (
    RowsTiles,
    by_chunks,
    listed,
    rows_bytes,
    rows_estimate,
    rows_kernels,
    together,
)
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.stream_cost import stream_bytes, stream_estimate
from crossfuse.planner.cascade.tile_cost import tile_bytes, tile_estimate
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families import ROWS, STREAM
from crossfuse.planner.families.gemm import GemmKernel
from crossfuse.planner.kernels.arrays import count
from crossfuse.planner.space.count import Step
from crossfuse.schema import Damaged, typed

#: Tiles with their estimated microseconds.
Timed: TypeAlias = "tuple[float, Tiles]"


def candidates(
    shape: CascadeShape, device: Device, family: str = ""
) -> tuple[tuple[Step, ...], tuple[Tiles, ...]]:
    """List tiles of a cascade that keep all rules, and how many tiles each rule leaves.

    An empty family is that of the whole.
    """
    if family == ROWS:
        assert shape.product is not None
        steps, kernels = rows_kernels(shape.product, device)
        whole = listed(kernels)
        return steps, (*whole, *by_chunks(shape.product, device, whole))
    if isinstance(shape.work, Work):
        return stream_space.stream_tiles(shape.work, device)
    return tile_space.cascade_tiles(shape.work, device)


def estimate(shape: CascadeShape, tiles: Tiles, device: Device, rates: Rates) -> Estimate:
    """Estimate one kernel of a cascade, with a user's own terms; its tiles must keep the rules."""
    found = _estimate(shape, tiles, device, rates)
    return with_own(found, rates.own, CascadeKernel(tiles), shape, device)


def _estimate(shape: CascadeShape, tiles: Tiles, device: Device, rates: Rates) -> Estimate:
    if isinstance(tiles, RowsTiles):
        assert shape.product is not None
        return rows_estimate(shape.product, tiles.kernel, device, rates, bool(tiles.chunk))
    if isinstance(shape.work, Work):
        assert isinstance(tiles, StreamTiles)
        return stream_estimate(shape.work, tiles, device, rates)
    assert isinstance(tiles, CascadeTiles)
    return tile_estimate(shape.work, tiles, device, rates)


def moved(shape: CascadeShape, tiles: Tiles, device: Device) -> dict[str, int]:
    """Bytes that one kernel moves by level; levels without any are left out."""
    if isinstance(tiles, RowsTiles):
        assert shape.product is not None
        found = rows_bytes(shape.product, tiles.kernel)
    elif isinstance(shape.work, Work):
        assert isinstance(tiles, StreamTiles)
        found = stream_bytes(shape.work, tiles, device)
    else:
        assert isinstance(tiles, CascadeTiles)
        found = tile_bytes(shape.work, tiles)
    return {name: size for name, size in found.items() if size}


def timed(
    shape: CascadeShape, device: Device, rates: Rates, family: str = ""
) -> tuple[tuple[Step, ...], tuple[Timed, ...]]:
    """Time the tiles of a family, the best first; also how many tiles each rule leaves."""
    if family == ROWS:
        return _timed_rows(shape, device, rates)
    steps, found = candidates(shape, device)
    times: Any = [(float(estimate(shape, e, device, rates).microseconds), e) for e in found]
    if isinstance(shape.work, Work):
        return steps, tuple(stream_space.ordered(shape.work, times))
    return steps, tuple(tile_space.ordered(times))


def parted(
    shape: CascadeShape, device: Device, rates: Rates, merge: str
) -> tuple[CascadeTiles, ...]:
    """Order tiles whose axis several CTAs share, the best first; none of a cascade without them."""
    if isinstance(shape.work, Work):
        return ()
    found = tile_space.parted_tiles(shape.work, device, merge)
    times: Any = [(float(estimate(shape, e, device, rates).microseconds), e) for e in found]
    return tuple(tiles for _, tiles in tile_space.ordered(times))


def _timed_rows(
    shape: CascadeShape, device: Device, rates: Rates
) -> tuple[tuple[Step, ...], tuple[Timed, ...]]:
    """Time all tiles of rows at once: asking the learned trees one by one is slow."""
    assert shape.product is not None
    steps, kernels = rows_kernels(shape.product, device)
    tiles = listed(kernels)
    if not tiles:
        return steps, ()
    times = dict(zip(tiles, _rows_times(shape, kernels, device, rates), strict=True))
    chunked = by_chunks(shape.product, device, tiles)
    if chunked:
        every = _rows_times(shape, kernels, device, rates, chunk=shape.product.chunk)
        of_tiles = dict(zip(tiles, every, strict=True))
        times |= {each: of_tiles[replace(each, chunk=0)] for each in chunked}
    return steps, tuple(rows_space.ordered([(time, each) for each, time in times.items()]))


def _rows_times(
    shape: CascadeShape, kernels: GemmKernel, device: Device, rates: Rates, *, chunk: int = 0
) -> list[float]:
    """Microseconds of kernels of arrays."""
    assert shape.product is not None
    found = rows_estimate(shape.product, kernels, device, rates, bool(chunk))
    every = CascadeKernel(together(kernels, chunk))
    whole = np.asarray(with_own(found, rates.own, every, shape, device).microseconds)
    times: list[float] = np.broadcast_to(whole.astype(np.float64), count(kernels)).tolist()
    return times


def in_order(
    shape: CascadeShape, device: Device, rates: Rates, family: str = ""
) -> tuple[tuple[Step, ...], tuple[Tiles, ...]]:
    """Order the tiles of a family, the best first; also how many tiles each rule leaves."""
    steps, found = timed(shape, device, rates, family)
    return steps, tuple(tiles for _, tiles in found)


def tile_fields(tiles: Tiles) -> dict[str, Any]:
    """Fields of tiles as plans and candidates name them; the default merge in DSM is left out."""
    return {name: each for name, each in asdict(tiles).items() if (name, each) != ("merge", DSM)}


def read_tiles(family: str, given: Mapping[str, Any]) -> Tiles:
    """Make tiles of their fields; those left out are as in the class, unknown ones are refused."""
    kinds: dict[str, Any] = {STREAM: StreamTiles, ROWS: RowsTiles}
    kind = kinds.get(family, CascadeTiles)
    try:
        made: Tiles = typed(kind, given)
    except Damaged as error:
        raise refuse(
            PlanRefused,
            "tiles",
            f"family '{family}'",
            found=error.found,
            limit=error.limit,
            instead="name tile extents like these",
        ) from None
    return made
