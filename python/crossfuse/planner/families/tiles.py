"""Family ``tiles``: a cascade as a stream of tiles, with products, and the rules of its tiles.

Its resources and its time are in `crossfuse.planner.cascade.tile_cost`.
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
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import tile_instructions
from crossfuse.planner.families import TILES
from crossfuse.planner.families.family import CascadeFamily, Rule, Steps, Taken, keep_rules

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
