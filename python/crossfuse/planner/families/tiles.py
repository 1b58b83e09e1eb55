"""Family ``tiles``: a cascade as a stream of tiles, with products.

Its tiles and their rules are in `crossfuse.planner.cascade.tile_space`, its time in
`crossfuse.planner.cascade.tile_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.cascade.rewrite.tiles import DSM, KERNEL, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import WARPGROUP, Device
from crossfuse.planner.cascade import tile_space
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.tile_cost import tile_bytes, tile_estimate
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import PLAIN, SPECIAL
from crossfuse.planner.families import TILES
from crossfuse.planner.families.cascade import CascadeFamily, Steps, Timed
from crossfuse.planner.families.family import of_rules

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site

#: How CTAs that share an axis merge, by where their states are then.
_MERGES = {"dsm": DSM, "global": KERNEL}


class Tiles(CascadeFamily[CascadeTiles]):
    """Warpgroups that multiply tiles of an axis, and keep the states of their rows."""

    name: ClassVar[str] = TILES
    text: ClassVar[str] = "a cascade as a stream of tiles with products"
    form: ClassVar[str] = "Stream of tiles (0: chosen)"
    rule: ClassVar[str] = "cascade_tiles.schedule_cascade_tiles"
    kind: ClassVar[Any] = CascadeTiles
    axes: ClassVar[tuple[str, ...]] = ("rows", "elements", "cluster")
    second: ClassVar[tuple[str, ...]] = ("elements", "cluster")
    state_places: ClassVar[Mapping[str, str]] = {"registers": "states in registers"}

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether the whole is a stream of tiles: no product follows, or reads rows of it."""
        alone = shape.product is None and shape.after is None
        return alone and isinstance(shape.work, TileWork)

    @property
    def work(self) -> TileWork:
        """What is counted of the cascade."""
        assert isinstance(self.shape.work, TileWork)
        return self.shape.work

    def candidates(self, device: Device) -> tuple[Steps, tuple[CascadeTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        return tile_space.cascade_tiles(self.work, device)

    def time(self, tiles: CascadeTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return tile_estimate(self.work, tiles, device, rates)

    def ordered(self, times: Sequence[Timed[CascadeTiles]]) -> list[Timed[CascadeTiles]]:
        """Sort tiles by their times, the best first."""
        return tile_space.ordered(times)

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
        found = tile_space.steps_of(work, tiles)
        waves = found.places * tiles.alone / tile_space.at_once(tiles, device)
        return Taken(
            found.places * tiles.cluster,
            tiles.ctas_of_cluster,
            WARPGROUP * (tile_space.multiplying(work, found.sizes) + 1),
            1,
            tile_space.sum_registers(work, found.sizes),
            tile_space.shared_size(work, found.sizes),
            round(max(1.0, waves), 2),
        )

    def computed(self, tiles: CascadeTiles) -> dict[str, int]:
        """Operations of both products, and instructions for each score."""
        work = self.work
        found = tile_space.steps_of(work, tiles)
        elements = found.total * found.sizes.rows * found.sizes.elements
        return {
            "tensor": 2 * elements * (work.depth + found.sizes.columns),
            SPECIAL: elements * work.exponentials,
            PLAIN: elements * work.operations,
        }

    @classmethod
    def schedule(
        cls, site: Site, derivation: Derivation, tiles: CascadeTiles, *, constant: bool
    ) -> Any:
        """Write the stream of tiles, and bind it."""
        return of_rules(cls.rule)(site, derivation, tiles)

    def kernels(self, tiles: CascadeTiles) -> tuple[str, ...]:
        """Name the launched kernels: a second one may merge."""
        return (self.name, "merge") if tiles.in_memory else (self.name,)

    def parted(self, place: str, device: Device, rates: Rates) -> tuple[CascadeTiles, ...]:
        """Order tiles whose axis several CTAs share; none of a cascade without them."""
        if place not in _MERGES:
            return ()
        found = tile_space.parted_tiles(self.work, device, _MERGES[place])
        ranked = tile_space.ordered(self.times(found, device, rates))
        return tuple(tiles for _, tiles in ranked)

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
