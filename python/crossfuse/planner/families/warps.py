"""Family ``warps``: a cascade with products of few rows, whose warps stream keys each by itself.

::

    time = start + maximum(steps of the busiest SM, memory) + barrier (clusters)

A step is latency as long as few bytes are on their way: a CTA loads the next tile while it computes
one, and waits for the slowest of its warps. Constants were fitted to 46 kernels of attention of one
token on an H200, `benchmarks/results/attention-one-token-h200.txt`: 4.5 % off in the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import ClassVar

from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.cascade.tile_cost import steps_of, tile_bytes
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families import WARPS
from crossfuse.planner.families.family import Rule, Steps, Taken, keep_rules
from crossfuse.planner.families.tiles import CLUSTERS, Tiles
from crossfuse.planner.kernels.stream import FLOAT_BYTES, ROWS, WarpStream, mailbox_bytes

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
