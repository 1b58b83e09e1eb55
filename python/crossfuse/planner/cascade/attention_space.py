"""Kernels of attention and its output product: their tiles, rules and estimates.

All CTAs are there from the beginning to the end: first they go through the tiles of the stream,
then through those of the product. Weights are loaded meanwhile, as many as their ring holds::

    time = stream + flag + product, without what has been loaded of its weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any

import numpy as np

from crossfuse.cascade.rewrite.tiles import WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.cascade.rows_space import TOGETHER
from crossfuse.planner.cascade.shape import OutputProduct
from crossfuse.planner.cascade.tile_cost import tile_bytes, tile_estimate
from crossfuse.planner.cascade.tile_space import (
    cascade_tiles,
    ordered,
    registers_fit,
    shared_size,
    splits_axis,
    step_bytes,
    steps_of,
)
from crossfuse.planner.cost.estimate import Work, corrected
from crossfuse.planner.cost.loop import Clock, memory_speed
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families.gemm import FAMILY as GEMM
from crossfuse.planner.families.gemm import GemmKernel
from crossfuse.planner.kernels.arrays import select
from crossfuse.planner.kernels.memory import LEAST_STAGES, Memory, memory
from crossfuse.planner.kernels.stream import BESIDE_STREAM
from crossfuse.planner.space.count import Step
from crossfuse.schema import Tile

_ROWS = (64, 128)
_ELEMENTS = (32, 64, 96, 128)
_CLUSTERS = (1, 2, 4, 8)
_COLUMNS = (16, 32, 48, 64, 96, 128, 192, 256)
#: Estimates closer than this are equal; of equal ones few CTAs a tile come first.
_EQUAL = 1.01
#: Columns that a CTA merges are a multiple of this; together they must be those of a head.
_SLICE = 8
#: What the product takes longer behind a stream, with which it shares shared memory, and whose
#: heads it waits for one by one: fitted to eight kernels of 16 and 128 tokens on an H100.
_BEHIND = 1.29
#: Stages that are of use.
_MOST_STAGES = 4


@dataclass(frozen=True)
class AttentionOutTiles:
    """Tiles of the stream and of the product, which have the same rows and clusters."""

    #: 64 for each warpgroup that multiplies.
    rows: Tile = 64
    #: Keys of a step of the stream.
    elements: Tile = 128
    #: CTAs of a cluster: they share the keys of a tile, then the reduction of the product.
    cluster: Tile = 1
    #: Columns of a tile of the product.
    columns: Tile = 64

    @property
    def stream(self) -> CascadeTiles:
        """Sizes of the stream."""
        return CascadeTiles(rows=self.rows, elements=self.elements, cluster=self.cluster)

    @property
    def product(self) -> dict[str, Any]:
        """Fields of the product's tiles."""
        fixed = {"cluster": 1, "across": 1}
        return {"rows": self.rows, "columns": self.columns, "split": self.cluster, **fixed}

    @property
    def kernel(self) -> GemmKernel:
        """The product's kernel, as it would be alone."""
        return GemmKernel.read(self.product)


#: A rule: its name, what it keeps in words, and whether tiles keep it.
_Rule = tuple[str, str, Callable[[AttentionOutTiles], Any]]


def attention_tiles(
    work: TileWork, after: OutputProduct, device: Device
) -> tuple[tuple[Step, ...], tuple[AttentionOutTiles, ...]]:
    """List the tiles that kernels can have, and how many tiles each rule leaves."""
    left = [AttentionOutTiles(*each) for each in product(_ROWS, _ELEMENTS, _CLUSTERS, _COLUMNS)]
    counts = [Step("all", "tiles that are tried", len(left))]
    for name, text, keeps in _rules(work, after, device):
        left = [each for each in left if keeps(each)]
        counts.append(Step(name, text, len(left)))
    return tuple(counts), tuple(left)


def _rules(work: TileWork, after: OutputProduct, device: Device) -> tuple[_Rule, ...]:
    shape = after.shape

    def rows(tiles: AttentionOutTiles) -> bool:
        # Rows of one sequence lie below those of another.
        apart = shape.m == work.rows or work.rows % tiles.rows == 0
        return apart and (tiles.rows == WARPGROUP_ROWS or tiles.rows <= work.rows)

    def share(tiles: AttentionOutTiles) -> bool:
        size, found = tiles.cluster, steps_of(work, tiles.stream)
        slices = work.columns % (_SLICE * size) == 0 and found.longest >= size
        room = found.places <= device.resident_clusters(size)
        fits = slices and room and size <= device.max_cluster
        return size == 1 or (splits_axis(work) and bool(fits))

    def of_product(tiles: AttentionOutTiles) -> bool:
        kernel = tiles.kernel
        return all(bool(each.keeps) for each in kernel.rules(shape, device))

    def resides(tiles: AttentionOutTiles) -> bool:
        (phase,) = tiles.kernel.phases(shape)
        return tiles.cluster == 1 or int(phase.tiles) <= device.resident_clusters(tiles.cluster)

    def shared(tiles: AttentionOutTiles) -> bool:
        return bool(room_of(work, after, tiles, device).fits)

    return (
        ("rows", "no warpgroup is without rows, and no tile has those of two sequences", rows),
        ("elements", "no tile beyond the keys", lambda e: e.elements < work.length + _ELEMENTS[0]),
        (
            "registers",
            "registers of a warpgroup hold scores, weights and sums",
            lambda each: registers_fit(work, steps_of(work, each.stream).sizes),
        ),
        ("clusters", "all clusters that share keys run at once, each with a slice to merge", share),
        ("product", "tiles that a product alone can have", of_product),
        ("resident", "clusters that split the product's reduction have one tile each", resides),
        ("shared", "two stages of each ring fit side by side", shared),
    )


def stream_size(work: TileWork, tiles: AttentionOutTiles, device: Device) -> int:
    """Bytes of shared memory of the stream: as many stages as fit in half of it, two at least."""
    sizes = steps_of(work, tiles.stream).sizes
    least, step = shared_size(work, sizes), step_bytes(work, sizes)
    # Tiles of queries have two slots where no states are handed over; a mailbox takes that place.
    least += sizes.rows * work.depth * work.left
    more = max(0, min(_MOST_STAGES - LEAST_STAGES, (device.max_shared_bytes // 2 - least) // step))
    return least + more * step


def room_of(
    work: TileWork, after: OutputProduct, tiles: AttentionOutTiles, device: Device
) -> Memory:
    """Shared memory of the product's rings beside the stream."""
    taken = stream_size(work, tiles, device) + BESIDE_STREAM
    left = replace(device, max_shared_bytes=max(0, device.max_shared_bytes - taken))
    return memory(tiles.kernel.phases(after.shape), left)


def attention_estimate(
    work: TileWork, after: OutputProduct, tiles: AttentionOutTiles, device: Device, rates: Rates
) -> Estimate:
    """Estimate a kernel: the stream, then the product, of whose weights a part is there."""
    stream = tile_estimate(work, tiles.stream, device, rates)
    kernel, shape = tiles.kernel, after.shape
    (phase,) = kernel.phases(shape)
    found, clock = Work(kernel, shape, device, rates, room_of(work, after, tiles, device)), Clock()
    # The ring fills with weights while the stream leaves memory free.
    gap = float(stream.microseconds) - stream.terms["start"] - stream.busy["hbm"]
    ahead = float(found.ahead(phase, max(0.0, gap)))
    found.run(clock, phase, found.load(float(shape.weight_bytes[0]), ahead))
    found.exchange(clock, phase)
    clock.stream("hbm", shape.further / memory_speed(rates))
    clock.add("store", rates.fitted.store)
    # Nothing of the flag is in the product's own terms.
    own = {name: float(time) for name, time in clock.terms.items()}
    exchanged = {name: own.pop(name) for name in ("exchange", "barrier")}
    merged = {name: stream.terms.get(name, 0.0) + time for name, time in exchanged.items()}
    terms = {
        **stream.terms,
        **{name: time for name, time in merged.items() if time},
        "flag": float(rates.measured.flag) + TOGETHER,
        "product": _BEHIND * sum(own.values()),
    }
    busy = {name: float(time) for name, time in stream.busy.items()}
    for name, time in clock.busy.items():
        busy[name] = busy.get(name, 0.0) + float(time)
    return Estimate(terms, busy)


def apart(work: TileWork, after: OutputProduct, device: Device, rates: Rates) -> Estimate:
    """Estimate two kernels: the stream, and the product, whose weights come before it is over.

    Each in its own tiles; the second kernel begins early, and waits for the first one.
    """
    plain = replace(rates, own=())
    _, streams = cascade_tiles(work, device)
    found = [(float(tile_estimate(work, e, device, plain).microseconds), e) for e in streams]
    first = tile_estimate(work, ordered(found)[0][1], device, plain)
    kernels: Any = GEMM.every(after.shape, device)
    times = np.asarray(corrected(kernels, after.shape, device, plain).microseconds)
    best = select(kernels, int(np.argmin(times)))
    second = corrected(best, after.shape, device, plain)
    terms = {name: float(time) for name, time in first.terms.items()}
    of_product = float(second.microseconds) - float(second.terms["start"])
    terms |= {"relaunch": float(rates.fitted.relaunch), "product": of_product}
    busy = {name: float(time) for name, time in first.busy.items()}
    for name, time in second.busy.items():
        busy[name] = busy.get(name, 0.0) + float(time)
    return Estimate(terms, busy)


def attention_bytes(
    work: TileWork, after: OutputProduct, tiles: AttentionOutTiles
) -> dict[str, int]:
    """Bytes that a kernel moves by level: heads go to L2, and come from there."""
    stream = tile_bytes(work, tiles.stream)
    own = tiles.kernel.moved_bytes(after.shape)
    found = {name: stream.get(name, 0) + own.get(name, 0) for name in {**stream, **own}}
    return {**found, "hbm": work.inputs + after.hbm_bytes}


def in_order(
    times: Sequence[tuple[float, AttentionOutTiles]],
) -> list[tuple[float, AttentionOutTiles]]:
    """Sort tiles by their times, the best first; of equal ones small clusters and wide tiles."""
    best = min((time for time, _ in times), default=1.0)

    def key(pair: tuple[float, AttentionOutTiles]) -> tuple[float, ...]:
        time, tiles = pair
        return (int(log(time / best) / log(_EQUAL) + 1e-9), tiles.cluster, -tiles.columns, time)

    return sorted(times, key=key)
