"""Family ``attention_out``: attention, and the product of what it makes, in one kernel.

Its tiles, their rules and its time are in `crossfuse.planner.cascade.attention_space`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.cascade.rewrite.tiles import WARPGROUP_ROWS
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import WARPGROUP, Device
from crossfuse.planner.cascade import attention_space
from crossfuse.planner.cascade.attention_space import AttentionOutTiles
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.shape import CascadeShape, OutputProduct
from crossfuse.planner.cascade.tile_space import steps_of, sum_registers
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import PLAIN, SPECIAL
from crossfuse.planner.families import ATTENTION_OUT
from crossfuse.planner.families.cascade import CascadeFamily, Steps, Timed
from crossfuse.planner.families.family import of_rules
from crossfuse.planner.kernels.memory import resident

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site


class AttentionOut(CascadeFamily[AttentionOutTiles]):
    """A stream of tiles, whose result is the left operand of a product in the same launch."""

    name: ClassVar[str] = ATTENTION_OUT
    text: ClassVar[str] = "attention, then the product of its heads, in one kernel"
    form: ClassVar[str] = "Attention first, and its output product in the same kernel"
    rule: ClassVar[str] = "attention_out.schedule_attention_out"
    kind: ClassVar[Any] = AttentionOutTiles
    axes: ClassVar[tuple[str, ...]] = ("rows", "elements", "cluster", "columns")
    second: ClassVar[tuple[str, ...]] = ("columns",)
    most: ClassVar[int] = 8

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether a product of what a stream of tiles makes follows it."""
        return shape.after is not None and isinstance(shape.work, TileWork)

    @property
    def work(self) -> TileWork:
        """What is counted of the stream."""
        assert isinstance(self.shape.work, TileWork)
        return self.shape.work

    @property
    def after(self) -> OutputProduct:
        """What is counted of the product."""
        assert self.shape.after is not None
        return self.shape.after

    def candidates(self, device: Device) -> tuple[Steps, tuple[AttentionOutTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        return attention_space.attention_tiles(self.work, self.after, device)

    def time(self, tiles: AttentionOutTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return attention_space.attention_estimate(self.work, self.after, tiles, device, rates)

    def ordered(self, times: Sequence[Timed[AttentionOutTiles]]) -> list[Timed[AttentionOutTiles]]:
        """Sort tiles by their times, the best first."""
        return attention_space.in_order(times)

    def apart(self, device: Device, rates: Rates) -> Estimate:
        """Estimate attention and its product as two kernels."""
        return attention_space.apart(self.work, self.after, device, rates)

    def moved(self, tiles: AttentionOutTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return attention_space.attention_bytes(self.work, self.after, tiles)

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
        beside = attention_space.room_of(work, self.after, tiles, device)
        size_of_stream = attention_space.stream_size(work, tiles, device)
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
        work = self.work
        found = steps_of(work, tiles.stream)
        elements = found.total * found.sizes.rows * found.sizes.elements
        return {
            "tensor": 2 * elements * (work.depth + found.sizes.columns) + self.after.chain.flops,
            SPECIAL: elements * work.exponentials,
            PLAIN: elements * work.operations,
        }

    @classmethod
    def schedule(
        cls, site: Site, derivation: Derivation, tiles: AttentionOutTiles, *, constant: bool
    ) -> Any:
        """Write the stream and the product as one kernel."""
        return of_rules("attention_out.attention_before_product")(site, derivation, tiles, constant)
