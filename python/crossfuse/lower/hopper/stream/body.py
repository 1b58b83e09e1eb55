"""What both roles of a stream's kernel share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.pipeline import Release, Ring, SharedMemory
from crossfuse.lower.hopper.statements import Coordinates, at, when
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.tiles import SeenTiles, Tiles
from crossfuse.planner.kernels.memory import STAGE_BARRIERS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.stream.warps import WarpPlan

#: Flags that a thread has on their way at once, and that one with 24 registers has.
_LOADS, _FEW_LOADS = 32, 8


@dataclass(frozen=True)
class StreamBody:
    """What the roles of a kernel share: its plan, and what is declared before they part."""

    plan: StreamPlan
    where: Coordinates
    #: Tensor map parameters by name.
    maps: dict[str, Any]
    memory: SharedMemory
    #: Barriers of what is loaded: queries, keys, and values unless these are keys.
    rings: tuple[Ring, ...]
    #: Address of the barrier of what the cluster's CTAs hand over; None if they do not.
    received: Any
    #: Buffer in global memory of what a second kernel merges; None without one.
    states: Any = None
    # In a kernel of products, where the CTAs of the cluster have met before the roles begin:
    #: Flags of stored tiles, for which others wait.
    writer: PlacedFlags | None = None
    #: Address of a barrier that completes when the first keys are asked for.
    gate: Any = None

    @staticmethod
    def declared(
        plan: StreamPlan | WarpPlan,
        where: Coordinates,
        maps: dict[str, Any],
        memory: SharedMemory,
        **beside: Any,
    ) -> StreamBody:
        """Declare the barriers of a stream in its shared memory; `beside` are the other fields.

        A plan of warps has no rings, and all else that is asked of a plan here.
        """
        rings, offset = [], 0
        for name, stages in plan.rings:
            rings.append(memory.ring(name, stages, offset))
            offset += STAGE_BARRIERS * stages
        received = memory.region("barriers")(offset) if plan.receives else None
        return StreamBody(
            cast("StreamPlan", plan), where, maps, memory, tuple(rings), received, **beside
        )

    def initialise(self, *others: Any) -> None:
        """Initialise all barriers by one warp, and `others` of one arrival each."""
        for ring, readers in zip(self.rings, self.plan.readers, strict=False):
            ring.initialise(readers, self.where.thread)
        single = [*others, *([] if self.received is None else [self.received])]
        if single:
            with when(self.where.thread == 0):
                for each in single:
                    mbarrier.initialise(each, 1)

    @property
    def queries(self) -> Ring:
        """The ring of queries."""
        return self.rings[0]

    @property
    def keys(self) -> Ring:
        """The ring of keys."""
        return self.rings[1]

    @property
    def values(self) -> Ring:
        """The ring of values; that of keys if both are one tile."""
        return self.rings[-1]

    def tiles(self, loads: int = _LOADS) -> Tiles:
        """A role's way through the tiles of the CTA.

        Of tiles that may be passed by, `loads` flags of a thread are on their way at once.
        """
        program = self.plan.program
        within = {}
        place = program.beside if program.split is None else program.split.place
        if place is not None and place.in_cluster:
            within[place.var] = self.where.rank.astype(str(place.var.ty))
        given = self.plan.order, program.stream, self.where.cluster, within
        if program.seen is None:
            return Tiles(*given)
        return SeenTiles(*given, program=program, lane=self.where.lane, loads=loads)

    def loading(self, warp: int) -> tuple[Any, Callable[[], Tiles]]:
        """Which threads of a warp load, and their way through the tiles.

        Beside several warpgroups that multiply they have few registers.
        """
        if self.plan.program.seen is None:
            return self.where.thread == warp * WARP, self.tiles
        few = self.plan.consumers > 1 or self.writer is not None
        return self.where.warp == warp, lambda: self.tiles(_FEW_LOADS if few else _LOADS)

    def raise_flag(self, places: dict[Any, Any]) -> None:
        """Signal that a warpgroup has stored its part of the tile at some places; by one thread."""
        if self.writer is not None:
            box = self.plan.output.box
            row, column = (at(box.origin[each], places) for each in (box.axis, -1))
            self.writer.raise_flag(row, column)

    def release(self, ring: Ring) -> Release:
        """How a warpgroup hands stages back to all who fill them."""
        sharers = 1 if ring is self.queries else self.plan.sharers
        rank = None if sharers == 1 else self.where.thread % sharers
        return Release(ring, self.where.thread, (sharers, rank), 1)
