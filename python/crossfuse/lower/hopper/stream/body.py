"""What both roles of a stream's kernel share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.pipeline import Release, Ring, ring_barriers
from crossfuse.lower.hopper.statements import Coordinates, Variable, at, let, strides, when
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, TileOrder
from crossfuse.lower.hopper.stream.program import Stream

# The tiles of rows that a CTA goes through, as each role counts them.


class Tiles:
    """A role's way through the tiles of its CTA: the current tile of rows, and of keys.

    `cta` is the number of the CTA, or of its cluster; `within` has values of the places that tell
    CTAs of a cluster apart.
    """

    def __init__(
        self, order: TileOrder, stream: Stream, cta: Any, within: dict[Any, Any] | None = None
    ) -> None:
        self.order = order
        self._within = within or {}
        self.stream = stream
        self._turn = Variable("turn", "int32", cta)
        self._second = Variable("second", "int32", 0) if order.paired else None
        places = (*order.outer, *([] if order.inner is None else [order.inner]))
        self._places = {each.var: Variable(str(each.var.name), "int32", 0) for each in places}
        self._end = Variable("end_of_stream", "int32", 0)
        self.block = Variable("block", "int32", 0)

    @property
    def places(self) -> dict[Any, Any]:
        """Values of the places of the current tile of rows."""
        own = {var: each.value.astype(str(var.ty)) for var, each in self._places.items()}
        return own | self._within

    @property
    def values(self) -> dict[Any, Any]:
        """The same, with the current tile of keys."""
        var = self.stream.var
        return self.places | {var: self.block.value.astype(str(var.ty))}

    @property
    def is_left(self) -> Any:
        """Whether there is a tile of rows after this one."""
        return self._turn.value < self.order.turns

    @property
    def is_last_block(self) -> Any:
        """Whether the current tile of keys is the last one."""
        return self.block.value + 1 == self._end.value

    @property
    def has_block(self) -> Any:
        """Whether there is a current tile of keys, not yet past the last one."""
        return self.block.value < self._end.value

    @contextmanager
    def all(self) -> Iterator[None]:
        """Statements for each tile of rows that is left."""
        with ir.script.While(self.is_left):
            self.take()
            yield

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Statements for each tile of keys that is left."""
        with ir.script.While(self.has_block):
            yield
            self.block.set(self.block.value + 1)

    def take(self) -> None:
        """Go on to the next tile of rows, and its first tile of keys."""
        turn = self._turn.value
        rest = turn
        if self.order.inner is not None:
            self._places[self.order.inner.var].set(self._inner(turn % self.order.turns_of_head))
            rest = turn // self.order.turns_of_head
        steps = strides(self.order.outer)
        for place in self.order.outer:
            index = rest // steps[place.var]
            if place is not self.order.outer[0]:
                index = index % place.extent
            self._places[place.var].set(index)
        first = at(self.stream.first, self.places).astype("int32")
        self.block.set(first)
        self._end.set(self.block.value + at(self.stream.count, self.places).astype("int32"))
        self._advance()

    def _inner(self, turn: Any) -> Any:
        """Tile of a head, long ones first: short ones fill up the last wave."""
        last = self.order.tiles - 1
        if self._second is None:
            return last - turn if self.order.uneven else turn
        return ir.script.Select(self._second.value == 0, last - turn, turn)

    def _advance(self) -> None:
        ctas = self.order.ctas
        if self._second is None:
            self._turn.set(self._turn.value + ctas)
            return
        # Of an odd number of tiles the one in the middle has no other.
        alone = self._turn.value % self.order.turns_of_head == self.order.tiles // 2
        leaves = self._second.value == 1
        if self.order.tiles % 2:
            leaves = ir.script.Or(leaves, alone)
        leaves = let("leaves_pair", leaves)
        self._second.set(ir.script.Select(leaves, 0, 1))
        with when(leaves):
            self._turn.set(self._turn.value + ctas)


@dataclass(frozen=True)
class StreamBody:
    """What the roles of a kernel share: its plan, and what is declared before they part."""

    plan: StreamPlan
    where: Coordinates
    #: Tensor map parameters by name.
    maps: dict[str, Any]
    #: Shared memory, as bytes.
    memory: Any
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
        plan: StreamPlan, where: Coordinates, maps: dict[str, Any], memory: Any, **beside: Any
    ) -> StreamBody:
        """Declare the barriers of a stream in its shared memory; `beside` are the other fields."""
        rings, offset = [], 0
        for name, stages in plan.rings:
            rings.append(ring_barriers(plan.arena, memory, f"{name}_barriers", stages, offset))
            offset += 16 * stages
        received = None
        if plan.receives:
            received = memory.ptr_to([plan.arena["barriers"].offset + offset])
        return StreamBody(plan, where, maps, memory, tuple(rings), received, **beside)

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

    def tiles(self) -> Tiles:
        """A role's way through the tiles of the CTA."""
        program = self.plan.program
        within = {}
        place = program.beside if program.split is None else program.split.place
        if place is not None and place.in_cluster:
            within[place.var] = self.where.rank.astype(str(place.var.ty))
        return Tiles(self.plan.order, program.stream, self.where.cluster, within)

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

    def region(self, name: str) -> Callable[[Any], Any]:
        """A function from an offset in a region to an address."""
        start = self.plan.arena[name].offset
        return lambda offset: self.memory.ptr_to([start + offset])
