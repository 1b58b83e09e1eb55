"""What both roles of a stream's kernel share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.tiles import Tiles
from crossfuse.lower.hopper.sync.ring import Release, Ring


@dataclass(frozen=True)
class StreamBody:
    """What the roles of a kernel work with.

    Attributes
    ----------
    plan : StreamPlan
        Its decisions.
    where : Coordinates
        Of the thread.
    maps : dict
        Tensor map parameters by name.
    memory : Any
        Shared memory, as bytes.
    queries, keys, values : Ring
        Barriers of what is loaded.
    images : dict
        Parameters of the kernel by those of the function.
    received : Any
        Address of the barrier of what the cluster's CTAs hand over; None without.
    states : Any
        Buffer in global memory of what a second kernel merges; None without.
    """

    plan: StreamPlan
    where: Coordinates
    maps: dict[str, Any]
    memory: Any
    queries: Ring
    keys: Ring
    values: Ring
    images: dict[Any, Any]
    received: Any = None
    states: Any = None

    def tiles(self) -> Tiles:
        """A role's way through the tiles of the CTA."""
        program = self.plan.program
        within = {}
        place = program.beside if program.split is None else program.split.place
        if place is not None and place.in_cluster:
            within[place.var] = self.where.rank.astype(str(place.var.ty))
        return Tiles(self.plan.order, program.stream, self.where.cluster, within)

    def release(self, ring: Ring) -> Release:
        """How a warpgroup hands stages back to all who fill them."""
        sharers = 1 if ring is self.queries else self.plan.sharers
        rank = None if sharers == 1 else self.where.thread % sharers
        return Release(ring, self.where.thread, (sharers, rank), 1)

    def region(self, name: str) -> Callable[[Any], Any]:
        """A function from an offset in a region to an address."""
        start = self.plan.arena[name].offset
        return lambda offset: self.memory.ptr_to([start + offset])
