"""Tiles of a stream with products, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import log

from crossfuse.cascade.rewrite.tiled.sizes import WARPGROUP_ROWS, WIDE, CascadeTiles
from crossfuse.cascade.rewrite.tiled.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.cascade.tile_limits import (
    at_once,
    registers_fit,
    shared_size,
    splits_axis,
    steps_together,
)
from crossfuse.planner.cascade.tile_steps import steps_of
from crossfuse.planner.space.count import Step

_ROWS = (64, 128, 192)
_ELEMENTS = (32, 64, 96, 128, 160, 192, 224, 256)
#: CTAs of a cluster. Sizes between can be given, and gain nothing: decoding of two sequences of 8
#: heads of keys took 26.6 us in clusters of 4, whose 64 CTAs reach the rate of memory, 29.1 in
#: clusters of 5 and 27.3 in clusters of 6; of one sequence 15.4 in clusters of 8, 15.3 of 9.
_CLUSTERS = (1, 2, 4, 8, 16)
#: CTAs with tiles of rows side by side that load what they share once.
_SHARES = (1, 2)
#: Elements of an axis that clusters share at least.
_LONG = 1024
#: Estimates closer than this are equal; of equal ones larger tiles without clusters come first.
_EQUAL = 1.02

#: A rule: its name, what it keeps in words, and whether tiles keep it.
Rule = tuple[str, str, Callable[[CascadeTiles], bool]]


def cascade_tiles(
    work: TileWork, device: Device
) -> tuple[tuple[Step, ...], tuple[CascadeTiles, ...]]:
    """List tiles that a stream with products can have.

    Parameters
    ----------
    work : TileWork
        The cascade.
    device : Device
        Limits.

    Returns
    -------
    tuple[Step, ...]
        How many tiles each rule leaves.
    tuple[CascadeTiles, ...]
        All that keep every rule.
    """
    chosen = CascadeTiles().complete(work.rows, work.length, work.columns, work.depth)
    elements = sorted({*_ELEMENTS, chosen.elements})
    left = [
        CascadeTiles(rows=rows, elements=size, cluster=cluster, share=share)
        for rows, size, cluster, share in product(_ROWS, elements, _CLUSTERS, _SHARES)
    ]
    counts = [Step("all", "tiles that are tried", len(left))]
    for name, text, keeps in _rules(work, device, chosen):
        left = [each for each in left if keeps(each)]
        counts.append(Step(name, text, len(left)))
    return tuple(counts), tuple(left)


def parted_tiles(work: TileWork, device: Device, merge: str) -> tuple[CascadeTiles, ...]:
    """List tiles whose axis several CTAs share, also where tiles of rows fill the device.

    Parameters
    ----------
    work : TileWork
        The cascade.
    device : Device
        Limits.
    merge : str
        Where states merge, see `CascadeTiles.merge`.

    Returns
    -------
    tuple[CascadeTiles, ...]
        Those that keep the rules; none where sums are in no registers to merge.
    """
    if not splits_axis(work):
        return ()
    chosen = CascadeTiles().complete(work.rows, work.length, work.columns, work.depth)
    left = [
        CascadeTiles(rows=rows, elements=size, cluster=cluster, merge=merge)
        for rows, size, cluster in product(_ROWS, _ELEMENTS, _CLUSTERS)
        if 1 < cluster <= device.max_cluster
    ]
    rules = [rule for name, _, rule in _rules(work, device, chosen) if name != "clusters"]
    left = [each for each in left if all(keeps(each) for keeps in rules)]
    return tuple(each for each in left if steps_of(work, each).longest >= each.cluster)


def ordered(times: Sequence[tuple[float, CascadeTiles]]) -> list[tuple[float, CascadeTiles]]:
    """Tiles by their times, the best first; of equal ones those of fewer CTAs, of larger tiles."""
    if not times:
        return []
    best = min(time for time, _ in times)

    def key(pair: tuple[float, CascadeTiles]) -> tuple[float, ...]:
        time, tiles = pair
        beyond = int(log(time / best) / log(_EQUAL) + 1e-9)
        return (beyond, tiles.cluster, -tiles.share, -tiles.rows * tiles.elements)

    return sorted(times, key=key)


def _rules(work: TileWork, device: Device, chosen: CascadeTiles) -> tuple[Rule, ...]:
    both = bool(work.depth and work.columns)

    def rows(tiles: CascadeTiles) -> bool:
        if not both or chosen.columns > WIDE:
            return tiles.rows == chosen.rows
        return tiles.rows == WARPGROUP_ROWS or tiles.rows <= work.rows

    def elements(tiles: CascadeTiles) -> bool:
        if not both and work.depth and work.length <= chosen.elements:
            return tiles.elements == chosen.elements
        return tiles.elements < work.length + min(_ELEMENTS)

    def clusters(tiles: CascadeTiles) -> bool:
        return tiles.cluster == 1 or (splits_axis(work) and _share(work, tiles, device))

    def beside(tiles: CascadeTiles) -> bool:
        wide = both and WIDE < chosen.columns <= 2 * WIDE and steps_together(work)
        return tiles.share == 1 or (
            wide and tiles.cluster == 1 and -(-work.rows // tiles.rows) % tiles.share == 0
        )

    return (
        ("rows", "no warpgroup is without rows; one where a product stands alone", rows),
        ("elements", "no tile beyond the axis; whole rows where one product makes them", elements),
        ("share", "tiles side by side of the same steps, where sums are wide and rows few", beside),
        (
            "clusters",
            f"clusters for axes beyond {_LONG} and sums of up to {WIDE} columns, where all "
            "tiles of rows find room at once",
            clusters,
        ),
        (
            "registers",
            "registers of a warpgroup hold scores, weights and sums",
            lambda each: registers_fit(work, steps_of(work, each).sizes),
        ),
        (
            "shared",
            f"two stages fit {device.max_shared_bytes >> 10} KiB of shared memory",
            lambda each: shared_size(work, steps_of(work, each).sizes) <= device.max_shared_bytes,
        ),
    )


def _share(work: TileWork, tiles: CascadeTiles, device: Device) -> bool:
    """Whether an axis is worth sharing: long, of few tiles, and all of them at work at once.

    A later wave of clusters takes as long as the first: 8 heads of 8192 keys (R3:batch=1) took 20.5
    us in clusters of 16, of which an H100 holds 7, and 15.0 in clusters of 8.
    """
    found = steps_of(work, tiles)
    room = found.places <= at_once(tiles, device) and tiles.cluster <= device.max_cluster
    return work.length > _LONG and room and found.longest >= tiles.cluster
