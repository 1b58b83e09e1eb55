"""What all roles of a kernel share, and the loops that they all go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, grid_places, unravel
from crossfuse.lower.hopper.dsm_gather import GatherBarriers
from crossfuse.lower.hopper.dsm_reduce import ExchangeBarriers
from crossfuse.lower.hopper.flags import Flags, PlacedFlags
from crossfuse.lower.hopper.pipeline import Ring
from crossfuse.lower.hopper.plan.kernel import KernelPlan
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.program.tile_program import SumProgram
from crossfuse.lower.hopper.rows.helping import Help
from crossfuse.lower.hopper.rows.plan import ChunkBarriers
from crossfuse.lower.hopper.statements import Variable, let, when
from crossfuse.lower.hopper.timeline import Timeline


@dataclass(frozen=True)
class Body:
    """What a kernel's roles work with.

    Attributes
    ----------
    plan : KernelPlan
        Its decisions.
    where : Coordinates
        Of the thread.
    maps : dict
        Tensor map parameters by name.
    memory : Any
        Shared memory, as bytes.
    left, right : Ring
        Barriers of left and right tiles.
    exchange : ExchangeBarriers | None
        If a reduction is split over the cluster.
    paired : Any
        Address of the barrier that completes when both CTAs of a pair have sent their halves.
    gather : GatherBarriers | None
        If an intermediate stays in the cluster.
    summed : Any
        Address of the barrier that completes when all parts of this CTA's tile are stored.
    rows_made : Any
        Address of the barrier that completes when the rows of its first left tile are made.
    flags : Any
        Buffer of flags in global memory; None if no phase follows another.
    timeline : Timeline
        Notes when it did what.
    chunks : ChunkBarriers | None
        If rows of the left operand are made chunk by chunk.
    help : Help | None
        If a CTA makes rows that others are late with.
    factors : Any
        Buffer of the factors of all rows in global memory, if the product has a head.
    own_made : Any
        Address of the barrier that completes when this CTA has made its own rows, if it has.
    """

    plan: KernelPlan
    where: Coordinates
    maps: dict[str, Any]
    memory: Any
    left: Ring
    right: Ring
    exchange: ExchangeBarriers | None
    paired: Any
    gather: GatherBarriers | None
    summed: Any
    rows_made: Any
    flags: Any
    timeline: Timeline
    chunks: ChunkBarriers | None = None
    help: Help | None = None
    factors: Any = None
    own_made: Any = None

    def region(self, name: str) -> Callable[[Any], Any]:
        """A function from an offset in a region to an address."""
        start = self.plan.arena[name].offset
        return lambda offset: self.memory.ptr_to([start + offset])

    def elements(self, name: str, dtype: str) -> Any:
        """A region as elements of a type."""
        region = self.plan.arena[name]
        buffer = ir.script.decl_buffer(
            (region.size * 8 // ir.tvm.DataType(dtype).bits,),
            dtype,
            data=self.memory.data,
            scope="shared.dyn",
            byte_offset=region.offset,
        )
        ir.IRBuilder.name(name, buffer)
        return buffer

    def places_of_sum(self, summed: SumProgram) -> dict[Any, Any]:
        """Values of the places of the sum of partial tiles; a cluster has one tile."""
        return unravel(summed.places, self.where.cluster, self.where.rank)

    def placed(self, flags: Flags) -> PlacedFlags:
        """Flags of a phase where they lie in memory."""
        return PlacedFlags(flags, self.flags, self.plan.first_flag(flags))

    @contextmanager
    def each_tile(self, phase: PhasePlan) -> Iterator[dict[Any, Any]]:
        """Statements for each tile of this cluster; yields the values of all places."""
        clusters, tiles = self.plan.clusters, phase.program.tiles
        cluster, places = self.where.cluster, self.where.places
        if clusters == tiles:
            yield places | grid_places(phase.program, cluster)
        elif clusters > tiles:
            with when(cluster < tiles):
                yield places | grid_places(phase.program, cluster)
        else:
            tile = Variable("tile", "int32", cluster)
            with ir.script.While(tile.value < tiles):
                yield places | grid_places(phase.program, tile.value)
                tile.set(tile.value + clusters)

    @contextmanager
    def each_step(
        self, phase: PhasePlan, first: int = 0, last: Any = None, *, unrolled: bool = False
    ) -> Iterator[tuple[dict[Any, Any], Any]]:
        """Statements for each step of the reduction; yields the step variable's value, and number.

        They differ where the CTAs of a cluster begin with their own slices. From a `first` one on,
        and to one before `last`, if they are given.
        """
        contraction, gather = phase.program.contraction, phase.program.takes
        steps = contraction.steps
        loop = ir.script.unroll if unrolled else ir.script.serial
        with loop(first, steps if last is None else last) as number:
            ir.IRBuilder.name("step", number)
            step = number
            if gather is not None and gather.ring and gather.place.extent > 1:
                first = self.where.places[gather.place.var] * (steps // gather.place.extent)
                step = let("step_of_ring", (first + number) % steps)
            yield {contraction.step: step}, number
