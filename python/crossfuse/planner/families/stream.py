"""Family ``stream``: a cascade as a stream of threads.

Its tiles and their rules are in `crossfuse.planner.cascade.stream_space`, its time in
`crossfuse.planner.cascade.stream_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import WARP, Device
from crossfuse.planner.cascade import stream_space
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.stream_cost import stream_bytes, stream_estimate
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import STREAM
from crossfuse.planner.families.cascade import CascadeFamily, Steps, Timed
from crossfuse.planner.families.family import of_rules

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site

#: Places of elements that outputs need again, by `StreamTiles.resident`.
_RESIDENT = {"registers": "registers", "shared": "shared memory", "none": "L2"}


class Stream(CascadeFamily[StreamTiles]):
    """Threads that take in a row, and merge what they have of it."""

    name: ClassVar[str] = STREAM
    text: ClassVar[str] = "a cascade as a stream of threads"
    form: ClassVar[str] = "Stream of threads"
    rule: ClassVar[str] = "stream.schedule_stream"
    kind: ClassVar[Any] = StreamTiles
    axes: ClassVar[tuple[str, ...]] = ("threads", "unroll", "cluster", "rows", "resident")
    second: ClassVar[tuple[str, ...]] = ("unroll", "resident")
    state_places: ClassVar[Mapping[str, str]] = {
        "registers": "states in registers",
        "dsm": "states in DSM",
    }

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether the whole streams without products."""
        return shape.product is None and isinstance(shape.work, Work)

    @property
    def work(self) -> Work:
        """What is counted of the cascade."""
        assert isinstance(self.shape.work, Work)
        return self.shape.work

    def candidates(self, device: Device) -> tuple[Steps, tuple[StreamTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        return stream_space.stream_tiles(self.work, device)

    def time(self, tiles: StreamTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return stream_estimate(self.work, tiles, device, rates)

    def ordered(self, times: Sequence[Timed[StreamTiles]]) -> list[Timed[StreamTiles]]:
        """Sort tiles by their times, the best first."""
        return stream_space.ordered(self.work, times)

    def moved(self, tiles: StreamTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return stream_bytes(self.work, tiles, device)

    def place_of(self, tiles: StreamTiles) -> str:
        """Describe where states and elements are stored."""
        state = "DSM" if tiles.cluster > 1 else "registers"
        if self.work.outputs:
            return f"states in {state}, elements in {_RESIDENT[tiles.resident]}"
        return f"states in {state}"

    def taken(self, tiles: StreamTiles, device: Device) -> Taken:
        """Resources of the device that a kernel takes."""
        work, size = self.work, tiles.cluster
        groups, side = -(-work.rows // tiles.rows), stream_space.ctas(work, tiles, device)
        room = side * device.resident_clusters(size)
        return Taken(
            groups * size,
            size,
            max(WARP, tiles.threads * tiles.rows),
            side,
            stream_space.registers(work, tiles),
            stream_space.shared_bytes(work, tiles),
            round(max(1.0, groups / room), 2),
        )

    def computed(self, tiles: StreamTiles) -> dict[str, int]:
        """Instructions for each element."""
        return instructions(self.work)

    @classmethod
    def schedule(
        cls, site: Site, derivation: Derivation, tiles: StreamTiles, *, constant: bool
    ) -> Any:
        """Write the stream, and bind it."""
        from crossfuse.cascade.rewrite.streaming import streaming

        return of_rules(cls.rule)(streaming(site, derivation, tiles), tiles)
