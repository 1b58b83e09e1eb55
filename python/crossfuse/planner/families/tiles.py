"""Families ``tiles`` and ``warps``: streams of tiles with products, by warpgroups or by warps.

Resources and times of the former are in `crossfuse.planner.cascade.tile_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from crossfuse.cascade.rewrite.tiles import DSM, KERNEL, WIDE, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.planner.cascade.tile_cost import (
    at_once,
    multiplying,
    registers_fit,
    shared_bytes,
    splits_axis,
    steps_of,
    steps_together,
    sum_registers,
    tile_bytes,
    tile_estimate,
)
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import tile_instructions
from crossfuse.planner.families import TILES, WARPS
from crossfuse.planner.families.family import CascadeFamily, Rule, Steps, Taken, keep_rules
from crossfuse.planner.kernels.memory import FLOAT_BYTES, ROWS, WarpStream, mailbox_bytes

#: How CTAs that share an axis merge, by where their states are then.
_MERGES = {"dsm": DSM, "global": KERNEL}


_ROWS = (64, 128, 192)
_ELEMENTS = (32, 64, 96, 128, 160, 192, 224, 256)
#: CTAs of a cluster. Sizes between can be given, and gain nothing: decoding of two sequences of 8
#: heads of keys took 26.6 us in clusters of 4, whose 64 CTAs reach the rate of memory, 29.1 in
#: clusters of 5 and 27.3 in clusters of 6; of one sequence 15.4 in clusters of 8, 15.3 of 9.
CLUSTERS = (1, 2, 4, 8, 16)
#: CTAs with tiles of rows side by side that load what they share once.
_SHARES = (1, 2)
#: Elements of an axis that clusters share beyond these. Of 256 they would save at most 0.8 us by
#: the estimate, which is off by as much; of 512 one sequence of 8 heads of keys takes 5.1 instead
#: of 7.4 us, of 1024 5.8 instead of 11.7 (128 columns, H200).
_LONG = 256


class Tiles(CascadeFamily[CascadeTiles, TileWork]):
    """Warpgroups that multiply tiles of an axis, and keep the states of their rows."""

    name: ClassVar[str] = TILES
    text: ClassVar[str] = "a cascade as a stream of tiles with products"
    form: ClassVar[str] = "Stream of tiles (0: chosen)"
    rule: ClassVar[str] = "stream.schedule_cascade_tiles"
    kind: ClassVar[Any] = CascadeTiles
    streams: ClassVar[Any] = TileWork
    axes: ClassVar[tuple[str, ...]] = ("rows", "elements", "cluster")
    second: ClassVar[tuple[str, ...]] = ("elements", "cluster")
    state_places: ClassVar[Mapping[str, str]] = {"registers": "states in registers"}

    @property
    def equal(self) -> float:
        """Estimates whose ratio is less than this are equal."""
        return 1.02

    def candidates(self, device: Device) -> tuple[Steps, tuple[CascadeTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        chosen = self._chosen
        elements = sorted({*_ELEMENTS, chosen.elements})
        tried = [
            CascadeTiles(rows=rows, elements=size, cluster=cluster, share=share)
            for rows, size, cluster, share in product(_ROWS, elements, CLUSTERS, _SHARES)
        ]
        return keep_rules(tried, _rules(self.work, device, chosen))

    @property
    def _chosen(self) -> CascadeTiles:
        """Tiles as the rewriting chooses them where none are given."""
        work = self.work
        return CascadeTiles().complete(work.rows, work.length, work.columns, work.depth)

    def time(self, tiles: CascadeTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return tile_estimate(self.work, tiles, device, rates)

    def preference(self, time: float, tiles: CascadeTiles) -> tuple[float, ...]:
        """Order tiles of equal times: few CTAs and large tiles first."""
        return (tiles.cluster, -tiles.share, -tiles.rows * tiles.elements)

    def moved(self, tiles: CascadeTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return tile_bytes(self.work, tiles)

    def place_of(self, tiles: CascadeTiles) -> str:
        """Describe where states are stored."""
        if tiles.in_memory:
            return "states in global memory"
        return "states in DSM" if tiles.cluster > 1 else "states in registers"

    def taken(self, tiles: CascadeTiles, device: Device) -> Taken:
        """Resources of the device that a kernel takes: one warpgroup more loads."""
        work = self.work
        found = steps_of(work, tiles)
        waves = found.places * tiles.alone / at_once(tiles, device)
        return Taken(
            found.places * tiles.cluster,
            tiles.ctas_of_cluster,
            WARPGROUP * (multiplying(work, found.sizes) + 1),
            1,
            sum_registers(work, found.sizes),
            shared_bytes(work, found.sizes, device) or 0,
            round(max(1.0, waves), 2),
        )

    def computed(self, tiles: CascadeTiles) -> dict[str, int]:
        """Operations of both products, and instructions for each score."""
        return tile_instructions(self.work, tiles)

    def kernels(self, tiles: CascadeTiles) -> tuple[str, ...]:
        """Name the launched kernels: a second one may merge."""
        return (self.name, "merge") if tiles.in_memory else (self.name,)

    def parted(self, place: str, device: Device, rates: Rates) -> tuple[CascadeTiles, ...]:
        """Order tiles whose axis several CTAs share, even where tiles of rows fill the device.

        None where sums are in no registers to merge.
        """
        work = self.work
        if place not in _MERGES or not splits_axis(work):
            return ()
        tried = [
            CascadeTiles(rows=rows, elements=size, cluster=cluster, merge=_MERGES[place])
            for rows, size, cluster in product(_ROWS, _ELEMENTS, CLUSTERS)
            if 1 < cluster <= device.max_cluster
        ]
        rules = [each for each in _rules(work, device, self._chosen) if each[0] != "clusters"]
        _, kept = keep_rules(tried, rules)
        found = [each for each in kept if steps_of(work, each).longest >= each.cluster]
        return tuple(tiles for _, tiles in self.ordered(self.times(found, device, rates)))

    def runners(
        self, found: Sequence[CascadeTiles], device: Device, rates: Rates
    ) -> tuple[CascadeTiles, ...]:
        """A merge by a second kernel, where clusters share an axis."""
        shared = any(each.cluster > 1 and not each.in_memory for each in found)
        return self.parted("global", device, rates)[:1] if shared else ()

    @classmethod
    def fields(cls, tiles: CascadeTiles) -> dict[str, Any]:
        """Fields of tiles as plans and candidates name them; the default merge is left out."""
        found = super().fields(tiles)
        return {name: each for name, each in found.items() if (name, each) != ("merge", DSM)}


def _rules(work: TileWork, device: Device, chosen: CascadeTiles) -> tuple[Rule[CascadeTiles], ...]:
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
            lambda each: shared_bytes(work, steps_of(work, each).sizes, device) is not None,
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


# Family ``warps``: a cascade with products of few rows, whose warps stream keys each by itself.
#
# ::
#
#     time = start + maximum(steps of the busiest SM, memory) + barrier (clusters)
#
# A step is latency as long as few bytes are on their way: a CTA loads the next tile while it
# computes
# one, and waits for the slowest of its warps. Constants were fitted to 46 kernels of attention of
# one
# token on an H200, `benchmarks/results/attention-one-token-h200.txt`: 4.5 % off in the median.


#: Keys of a tile: those of four warps with 16 or 32 each, and of eight.
_KEYS = (64, 128, 256)
#: Keys of a tile of four warps that have a word of flags each.
_USUAL = 128
#: Bytes of an element of all operands.
_ITEM = 2
#: Microseconds of a step whose loads are few, and of a KiB of it, while others are not in the way.
_STEP, _OF_KIB = 0.44, 0.027
#: KiB that an SM takes in in a microsecond.
_INGEST = 51.0
#: Microseconds of start and end beyond the latency of memory, and for each doubling of the CTAs.
_ENDS = (-3.0, 0.7)
#: How much longer memory takes than when nothing but copies goes on; and of the longer of its time
#: and that of the steps: hardly more than either.
_MEMORY, _SHARPNESS = 1.12, 7


class Warps(Tiles):
    """Warps that multiply keys of their own from registers; CTAs share an axis in clusters."""

    name: ClassVar[str] = WARPS
    text: ClassVar[str] = "a cascade of few rows with products, as a stream of each warp"
    form: ClassVar[str] = "Stream of warps (0: chosen)"
    axes: ClassVar[tuple[str, ...]] = ("elements", "cluster")
    second: ClassVar[tuple[str, ...]] = ("cluster",)

    def candidates(self, device: Device) -> tuple[Steps, tuple[CascadeTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        tried = [CascadeTiles(*each) for each in product(ROWS, _KEYS)]
        found = [CascadeTiles(e.rows, e.elements, cluster=c) for e, c in product(tried, CLUSTERS)]
        return keep_rules(found, self._rules(device))

    def time(self, tiles: CascadeTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        work, found = self.work, steps_of(self.work, tiles)
        ctas = found.places * tiles.cluster
        of_sm = -(-ctas // device.sms)
        together = min(of_sm, self._resident(tiles, device))
        kib = tiles.elements * (work.depth + work.columns * (not work.same)) * _ITEM / 1024
        step = max(_STEP + _OF_KIB * kib, together * kib / _INGEST)
        serial = -(-of_sm // together) * -(-found.longest // tiles.cluster)
        moved = tile_bytes(work, tiles)
        written = moved["hbm"] - work.inputs
        measured = rates.measured
        busy = {
            "hbm": _MEMORY * work.inputs / measured.hbm_read + written / measured.hbm_write,
            "l2": moved["l2"] / (rates.fitted.l2 * measured.l2_read),
        }
        both = (busy["hbm"] ** _SHARPNESS + (serial * step) ** _SHARPNESS) ** (1 / _SHARPNESS)
        terms = {"hbm": busy["hbm"], "steps": both - busy["hbm"]}
        terms["start"] = max(0.0, float(rates.start_time(tiles.cluster, ctas, _ENDS)))
        if tiles.cluster > 1:
            terms["barrier"] = float(at(measured.cluster_barrier, tiles.cluster))
        return Estimate({name: time for name, time in terms.items() if time}, busy)

    def moved(self, tiles: CascadeTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level: no tile passes through shared memory."""
        return super().moved(tiles, device) | {"shared": 0}

    def preference(self, time: float, tiles: CascadeTiles) -> tuple[float, ...]:
        """Order tiles of equal times: four warps with 32 keys each first, then few CTAs."""
        return (abs(tiles.elements - _USUAL), tiles.cluster)

    def taken(self, tiles: CascadeTiles, device: Device) -> Taken:
        """Resources of the device that a kernel takes."""
        size = self._size(tiles)
        ctas = steps_of(self.work, tiles).places * tiles.cluster
        side = self._resident(tiles, device)
        return Taken(
            ctas,
            tiles.cluster,
            size.threads,
            side,
            size.registers,
            self._shared(tiles),
            round(max(1.0, ctas / (side * device.sms)), 2),
        )

    def parted(self, place: str, device: Device, rates: Rates) -> tuple[CascadeTiles, ...]:
        """Order tiles whose states merge in a place: in clusters, which are candidates."""
        return ()

    def runners(
        self, found: Sequence[CascadeTiles], device: Device, rates: Rates
    ) -> tuple[CascadeTiles, ...]:
        """No kernels but the candidates."""
        return ()

    def _size(self, tiles: CascadeTiles) -> WarpStream:
        work = self.work
        return WarpStream(tiles.rows, tiles.elements, work.depth, work.columns, work.arrays)

    def _inbox(self, tiles: CascadeTiles) -> int:
        """Bytes of what CTAs hand over to one of them."""
        if tiles.cluster == 1:
            return 0
        work, columns = self.work, tiles.slice_of(self.work.columns)
        return mailbox_bytes(tiles.cluster, min(tiles.rows, work.rows), columns, work.slots)

    def _shared(self, tiles: CascadeTiles) -> int:
        # Beside slots a row has factors and results of some of them.
        return self._size(tiles).arena(4 * self.work.slots, self._inbox(tiles)).size

    def _resident(self, tiles: CascadeTiles, device: Device) -> int:
        return self._size(tiles).resident(self._shared(tiles), device)

    def _rules(self, device: Device) -> tuple[Rule[CascadeTiles], ...]:
        work: TileWork = self.work
        both = bool(work.depth and work.columns)
        narrow = both and {work.left, work.right, work.value or work.right} == {_ITEM}

        def rows(tiles: CascadeTiles) -> bool:
            return work.rows <= tiles.rows and (tiles.rows == ROWS[0] or work.rows > ROWS[0])

        def elements(tiles: CascadeTiles) -> bool:
            return tiles.elements < work.length + min(_KEYS)

        def clusters(tiles: CascadeTiles) -> bool:
            found, size = steps_of(work, tiles), tiles.cluster
            if size == 1 or size > min(found.longest, device.max_cluster):
                return size == 1
            return found.places <= self._resident(tiles, device) * device.resident_clusters(size)

        return (
            ("products", "two products of elements of 16 bits", lambda _: narrow),
            ("rows", f"rows that a fragment of {ROWS[0]} has, or two", rows),
            ("elements", "no tile beyond the axis", elements),
            ("registers", "registers hold a tile's keys and values", self._holds),
            ("clusters", "clusters that run at once, each CTA of which has a tile", clusters),
        )

    def _holds(self, tiles: CascadeTiles) -> bool:
        return not self._size(tiles).broken() and self._inbox(tiles) % FLOAT_BYTES == 0
