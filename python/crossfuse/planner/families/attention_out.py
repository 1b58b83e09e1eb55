"""Family ``attention_out``: attention, and the product of what it makes, in one kernel.

All CTAs are there from the beginning to the end: first they go through the tiles of the stream,
then through those of the product. Weights are loaded meanwhile, as many as their ring holds::

    time = stream + flag + product, without what has been loaded of its weights
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.planner.cascade.shape import CascadeShape, OutputProduct
from crossfuse.planner.cascade.tile_cost import (
    least_bytes,
    registers_fit,
    splits_axis,
    step_bytes,
    steps_of,
    sum_registers,
    tile_bytes,
    tile_estimate,
)
from crossfuse.planner.cost.estimate import Clock, Work, best_of, memory_speed
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate, added
from crossfuse.planner.explain.levels import tile_instructions
from crossfuse.planner.families import ATTENTION_OUT
from crossfuse.planner.families.family import CascadeFamily, Rule, Steps, Taken, keep_rules
from crossfuse.planner.families.rows import TOGETHER
from crossfuse.planner.families.tiled import GEMM, GemmKernel
from crossfuse.planner.families.tiles import Tiles
from crossfuse.planner.kernels.memory import BESIDE_STREAM, LEAST_STAGES, Memory, memory, resident
from crossfuse.schema import Tile

_ROWS = (64, 128)
_ELEMENTS = (32, 64, 96, 128)
_CLUSTERS = (1, 2, 4, 8)
_COLUMNS = (16, 32, 48, 64, 96, 128, 192, 256)
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


class AttentionOut(CascadeFamily[AttentionOutTiles, TileWork]):
    """A stream of tiles, whose result is the left operand of a product in the same launch."""

    name: ClassVar[str] = ATTENTION_OUT
    text: ClassVar[str] = "attention, then the product of its heads, in one kernel"
    form: ClassVar[str] = "Attention first, and its output product in the same kernel"
    rule: ClassVar[str] = "rows.schedule_attention_out"
    kind: ClassVar[Any] = AttentionOutTiles
    streams: ClassVar[Any] = TileWork
    followed: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]] = ("rows", "elements", "cluster", "columns")
    second: ClassVar[tuple[str, ...]] = ("columns",)
    most: ClassVar[int] = 8

    @property
    def after(self) -> OutputProduct:
        """What is counted of the product."""
        assert self.shape.after is not None
        return self.shape.after

    def candidates(self, device: Device) -> tuple[Steps, tuple[AttentionOutTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        tried = product(_ROWS, _ELEMENTS, _CLUSTERS, _COLUMNS)
        return keep_rules([AttentionOutTiles(*each) for each in tried], self._rules(device))

    def _rules(self, device: Device) -> tuple[Rule[AttentionOutTiles], ...]:
        work, shape = self.work, self.after.shape

        def elements(tiles: AttentionOutTiles) -> bool:
            return tiles.elements < work.length + _ELEMENTS[0]

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
            return bool(self.room(tiles, device).fits)

        return (
            ("rows", "no warpgroup is without rows, and no tile has those of two sequences", rows),
            ("elements", "no tile beyond the keys", elements),
            (
                "registers",
                "registers of a warpgroup hold scores, weights and sums",
                lambda each: registers_fit(work, steps_of(work, each.stream).sizes),
            ),
            (
                "clusters",
                "all clusters that share keys run at once, each with a slice to merge",
                share,
            ),
            ("product", "tiles that a product alone can have", of_product),
            ("resident", "clusters that split the product's reduction have one tile each", resides),
            ("shared", "two stages of each ring fit side by side", shared),
        )

    def stream_size(self, tiles: AttentionOutTiles, device: Device) -> int:
        """Bytes of shared memory of the stream: two stages, or as many as fit in half of it.

        Times were fitted to these, which are not quite those of the kernel.
        """
        work, sizes = self.work, steps_of(self.work, tiles.stream).sizes
        least, step = least_bytes(work, sizes), step_bytes(work, sizes)
        # Tiles of queries have two slots where no states are handed over; a mailbox takes that
        # place.
        least += sizes.rows * work.depth * work.left
        wanted = (device.max_shared_bytes // 2 - least) // step
        return least + max(0, min(_MOST_STAGES - LEAST_STAGES, wanted)) * step

    def room(self, tiles: AttentionOutTiles, device: Device) -> Memory:
        """Shared memory of the product's rings beside the stream."""
        taken = self.stream_size(tiles, device) + BESIDE_STREAM
        left = replace(device, max_shared_bytes=max(0, device.max_shared_bytes - taken))
        return memory(tiles.kernel.phases(self.after.shape), left)

    def preference(self, time: float, tiles: AttentionOutTiles) -> tuple[float, ...]:
        """Order tiles of equal times: small clusters and wide tiles first."""
        return (tiles.cluster, -tiles.columns, time)

    def time(self, tiles: AttentionOutTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate the stream, then the product, of whose weights a part is there by then."""
        stream = tile_estimate(self.work, tiles.stream, device, rates)
        kernel, shape = tiles.kernel, self.after.shape
        (phase,) = kernel.phases(shape)
        found, clock = Work(kernel, shape, device, rates, self.room(tiles, device)), Clock()
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
        return Estimate(terms, added(stream.busy, clock.busy))

    def apart(self, device: Device, rates: Rates) -> Estimate:
        """Estimate attention, and its product, whose weights come before the first is over.

        Each in its own tiles; the second kernel begins early, and waits for the first one.
        """
        plain = replace(rates, own=())
        streams = Tiles(CascadeShape(self.shape.name, self.work))
        _, (first, *_) = streams.in_order(device, plain)
        of_stream = streams.time(first, device, plain)
        second = best_of(GEMM.every(self.after.shape, device), self.after.shape, device, plain)
        of_product = float(second.microseconds) - float(second.terms["start"])
        own = {"relaunch": float(rates.fitted.relaunch), "product": of_product}
        terms = {name: float(time) for name, time in of_stream.terms.items()}
        return Estimate({**terms, **own}, added(of_stream.busy, second.busy))

    def moved(self, tiles: AttentionOutTiles, device: Device) -> dict[str, int]:
        """Bytes that a kernel moves by level: heads go to L2, and come from there."""
        stream = tile_bytes(self.work, tiles.stream)
        own = tiles.kernel.moved_bytes(self.after.shape)
        found = {name: stream.get(name, 0) + own.get(name, 0) for name in {**stream, **own}}
        return {**found, "hbm": self.work.inputs + self.after.hbm_bytes}

    def place_of(self, tiles: AttentionOutTiles) -> str:
        """Describe where states and heads are stored."""
        states = "DSM" if tiles.cluster > 1 else "registers"
        return f"states in {states}, heads in L2"

    def taken(self, tiles: AttentionOutTiles, device: Device) -> Taken:
        """Resources of the device that a kernel takes: one warpgroup more loads."""
        work, size = self.work, tiles.cluster
        found = steps_of(work, tiles.stream)
        (phase,) = tiles.kernel.phases(self.after.shape)
        room = int(resident(device, size))
        most = max(found.places, int(phase.tiles))
        beside, size_of_stream = self.room(tiles, device), self.stream_size(tiles, device)
        return Taken(
            min(most, room) * size,
            size,
            WARPGROUP * (tiles.rows // WARPGROUP_ROWS + 1),
            1,
            max(sum_registers(work, found.sizes), int(phase.sums)),
            size_of_stream + int(beside.size),
            round(max(1.0, most / room), 2),
        )

    def computed(self, tiles: AttentionOutTiles) -> dict[str, int]:
        """Operations of all products, and instructions for each score."""
        found = tile_instructions(self.work, tiles.stream)
        return {**found, "tensor": found["tensor"] + self.after.chain.flops}
