"""All kernels of a cascade and their estimates, whichever family it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias

from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade import stream_space, tile_space
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.stream_cost import stream_bytes, stream_estimate
from crossfuse.planner.cascade.tile_cost import tile_bytes, tile_estimate
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families import STREAM
from crossfuse.planner.space.count import Step

Tiles: TypeAlias = "StreamTiles | CascadeTiles"


def candidates(shape: CascadeShape, device: Device) -> tuple[tuple[Step, ...], tuple[Tiles, ...]]:
    """Tiles of a cascade that keep all rules, and how many each rule leaves."""
    if isinstance(shape.work, Work):
        return stream_space.stream_tiles(shape.work, device)
    return tile_space.cascade_tiles(shape.work, device)


def estimate(shape: CascadeShape, tiles: Tiles, device: Device, rates: Rates) -> Estimate:
    """Estimate one kernel of a cascade; its tiles keep the rules."""
    if isinstance(shape.work, Work):
        assert isinstance(tiles, StreamTiles)
        return stream_estimate(shape.work, tiles, device, rates)
    assert isinstance(tiles, CascadeTiles)
    return tile_estimate(shape.work, tiles, device, rates)


def moved(shape: CascadeShape, tiles: Tiles, device: Device) -> dict[str, int]:
    """Bytes that one kernel moves by level; levels without any are left out."""
    if isinstance(shape.work, Work):
        assert isinstance(tiles, StreamTiles)
        found = stream_bytes(shape.work, tiles, device)
    else:
        assert isinstance(tiles, CascadeTiles)
        found = tile_bytes(shape.work, tiles)
    return {name: size for name, size in found.items() if size}


def in_order(
    shape: CascadeShape, device: Device, rates: Rates
) -> tuple[tuple[Step, ...], tuple[Tiles, ...]]:
    """Tiles of a cascade, the best by the estimate first, and how many each rule leaves."""
    steps, found = candidates(shape, device)
    times: Any = [(estimate(shape, e, device, rates).microseconds, e) for e in found]
    order = stream_space.ordered if shape.family == STREAM else tile_space.ordered
    return steps, tuple(tiles for _, tiles in order(times))


def tile_fields(tiles: Tiles) -> dict[str, Any]:
    """Fields of tiles as plans and candidates name them: all of them, by name."""
    return asdict(tiles)


def read_tiles(family: str, given: Mapping[str, Any]) -> Tiles:
    """Make tiles of their fields; what is left out is as in the class.

    Raises
    ------
    PlanRefused
        For fields that there are not.
    """
    kind: Any = StreamTiles if family == STREAM else CascadeTiles
    known = tuple(each.name for each in fields(kind))
    if unknown := sorted(given.keys() - set(known)):
        raise refuse(
            PlanRefused,
            "tiles",
            f"family '{family}'",
            found=", ".join(unknown),
            limit=", ".join(known),
            instead="name tile extents like these",
        )
    made: Tiles = kind(**given)
    return made
