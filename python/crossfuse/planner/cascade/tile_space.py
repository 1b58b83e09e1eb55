"""Tiles of a stream with products, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import log

import numpy as np

from crossfuse.cascade.rewrite.tiles import WARPGROUP_ROWS, WIDE, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.kernels.stream import (
    REGISTERS,
    StreamMemory,
    adders_of,
    element_registers,
    handoff_bytes,
    mailbox_bytes,
    tile_bytes,
)
from crossfuse.planner.space.count import Step

# Resources of an SM that a stream of tiles takes.

#: Stages of the ring that are worth it, and bytes of barriers and of arithmetic that is kept in its
#: place, at most.
_STAGES, _REST = 2, 1024


def sum_registers(work: TileWork, sizes: CascadeTiles) -> int:
    """Float32 registers of a thread for scores, their weights, and sums.

    Sums of more columns than a warpgroup holds are shared by two.
    """
    return element_registers(sizes.elements, 1) + min(sizes.columns, WIDE) // 2


def registers_fit(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether warpgroups have registers for a tile.

    Of expressions that need one array of scores, those are left out that only a warpgroup of their
    own has registers for: the estimate knows none, but where sums are wide.
    """
    of_rows = REGISTERS.get(sizes.rows // WARPGROUP_ROWS)
    if of_rows is None or sum_registers(work, sizes) > of_rows[-1]:
        return False
    return not work.columns or adders(work, sizes) is not None


def adders(work: TileWork, sizes: CascadeTiles) -> int | None:
    """Warpgroups that share columns, see `crossfuse.planner.kernels.stream.adders_of`."""
    split = sizes.cluster > 1
    return adders_of(sizes.rows, sizes.elements, sizes.columns, work.arrays, split=split)


def multiplying(work: TileWork, sizes: CascadeTiles) -> int:
    """Warpgroups that multiply: one for 64 rows, and those that share its columns."""
    shared = adders(work, sizes) if work.columns else 0
    return sizes.rows // WARPGROUP_ROWS + (shared or 0)


def at_once(tiles: CascadeTiles, device: Device) -> int:
    """Tiles of rows that a device works on at once, one CTA on an SM.

    Where a second kernel merges, these are parts of tiles, which wait for no others.
    """
    return tiles.share * device.resident_clusters(tiles.ctas_of_cluster)


def splits_axis(work: TileWork) -> bool:
    """Whether CTAs can share the axis: wide sums are in no registers to merge.

    Two warpgroups share them, apart from the rows whose states are merged.
    """
    return bool(work.depth) and 0 < work.columns <= WIDE


def steps_together(work: TileWork) -> bool:
    """Whether tiles of rows side by side go through the same elements, so that one load serves all.

    Under a causal mask each of them ends elsewhere.
    """
    return len({(first, behind) for _, first, behind in work.spans}) <= 1


def shared_size(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of shared memory of a CTA with as few stages as are worth it, at least.

    Results of more columns than a box leave through what the ring has then.
    """
    boxes = sizes.rows * min(sizes.columns, 64) * work.item
    held = sizes.rows * sizes.depth * work.left if holds_left(work, sizes) else 0
    return held + boxes + _STAGES * step_bytes(work, sizes) + _REST


def shared_fits(work: TileWork, sizes: CascadeTiles, device: Device) -> bool:
    """Whether two stages are worth it, and the kernel fits with as many as it needs."""
    limit = device.max_shared_bytes
    if shared_size(work, sizes) > limit:
        return False
    return not work.columns or _stream_memory(work, sizes).divide(0, limit) is not None


def _stream_memory(work: TileWork, sizes: CascadeTiles) -> StreamMemory:
    """Shared memory of a stream between two products."""
    rows, keys, columns = sizes.rows, sizes.elements, sizes.columns
    stored = min(rows, work.rows)
    handed = None
    if sizes.cluster > 1:
        size = mailbox_bytes(sizes.cluster, stored, sizes.slice_of(columns), work.slots)
        handed = ("inbox", 0 if sizes.in_memory else size)
    elif adders(work, sizes):
        # A factor and a result of each slot at most.
        handed = ("passed", handoff_bytes(keys, 2 * work.slots))
    return StreamMemory(
        rows,
        stored,
        tile_bytes(rows, sizes.depth, work.left),
        tile_bytes(keys, sizes.depth, work.right),
        0 if work.same else tile_bytes(keys, columns, work.value),
        WARPGROUP_ROWS * columns * 2,
        handed,
    )


def step_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes that a step loads into a CTA: tiles of both right operands, and of loaded elements.

    Where a product's depth is cut, a step is one piece of it.
    """
    right = sizes.elements * sizes.depth * work.right
    loaded = not work.depth or not holds_left(work, sizes)
    left = sizes.rows * (sizes.depth or sizes.elements) * work.left if loaded else 0
    return right + value_bytes(work, sizes) + left


def value_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of a step that only the second product takes; 0 where both share an operand."""
    return 0 if work.same else sizes.elements * sizes.columns * work.value


def holds_left(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether the left operand of the first product stays in shared memory.

    Not where one product makes whole rows: both its operands are loaded together.
    """
    all_depth = bool(work.depth) and sizes.depth == work.depth
    return all_depth and not sizes.makes_whole_rows(work.length)


# Steps of tiles of rows: the tiles of the axis that each of them needs, and which are masked.


@dataclass(frozen=True)
class Steps:
    """Steps of all CTAs of a stream of tiles: tiles of the axis against tiles of rows."""

    sizes: CascadeTiles
    places: int
    total: int
    longest: int
    masked: int

    @property
    def even(self) -> bool:
        """Whether all tiles have equally many steps."""
        return self.total == self.places * self.longest


def steps_of(work: TileWork, tiles: CascadeTiles) -> Steps:
    """Count the steps of tiles; what `tiles` leave open is chosen as for the kernel."""
    sizes = tiles.complete(work.rows, work.length, work.columns, work.depth)
    tall = -(-work.rows // sizes.rows)
    wide = -(-work.columns // sizes.columns) if sizes.columns else 1
    needed, masked = _needed(work, sizes, tall)
    others = work.groups * wide
    return Steps(
        sizes,
        tall * others,
        int(needed.sum()) * others,
        int(needed.max()),
        int(masked.sum()) * others,
    )


def _needed(work: TileWork, sizes: CascadeTiles, tall: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of each tile of rows, and those of them that not all of its rows need whole."""
    count = -(-work.length // sizes.elements)
    if not work.spans:
        # Masks that bound nothing are computed everywhere.
        masked = count if work.masks else 0
        return np.full(tall, count), np.full(tall, masked)
    rows, first, behind = np.array(work.spans, np.float64).T
    top = np.arange(tall) * sizes.rows
    last = np.minimum(top + sizes.rows, work.rows) - 1
    ends = np.stack([top, last])
    starts, stops = np.interp(ends, rows, first), np.interp(ends, rows, behind)
    begin = np.floor(starts.min(0) / sizes.elements)
    stop = np.minimum(count, np.floor((stops.max(0) - 1) / sizes.elements) + 1)
    needed = np.maximum(1, stop - begin)
    whole = np.floor(stops.min(0) / sizes.elements) - np.ceil(starts.max(0) / sizes.elements)
    return needed, needed - np.clip(whole, 0, needed)


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
    """List the tiles that a stream with products can have, and how many tiles each rule leaves."""
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
    """List tiles whose axis several CTAs share, even where tiles of rows fill the device.

    None where sums are in no registers to merge. `merge` is that of `CascadeTiles.merge`.
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
    """Sort tiles by their times, the best first; of equal ones few CTAs and large tiles first."""
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
            lambda each: shared_fits(work, steps_of(work, each).sizes, device),
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
