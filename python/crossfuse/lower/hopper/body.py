"""What all roles of a kernel share: its memory and barriers, and the loops over tiles and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, grid_places
from crossfuse.lower.hopper.flags import Flags, PlacedFlags
from crossfuse.lower.hopper.pipeline import Ring
from crossfuse.lower.hopper.plan.kernel import KernelPlan
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import Variable, when
from crossfuse.lower.hopper.timeline import Timeline


@dataclass(frozen=True)
class Body:
    """The plan, coordinates, memory and barriers that a kernel's roles work with."""

    plan: KernelPlan
    where: Coordinates
    #: Tensor map parameters by name.
    maps: dict[str, Any]
    #: Shared memory, as bytes.
    memory: Any
    left: Ring
    right: Ring
    #: Buffers in global memory that are no parameters of the function, by name.
    buffers: dict[str, Any]
    timeline: Timeline

    def region(self, name: str) -> Callable[[Any], Any]:
        """A function from a byte offset in a region of shared memory to an address."""
        start = self.plan.arena[name].offset
        return lambda offset: self.memory.ptr_to([start + offset])

    def barrier(self, name: str, number: Any = 0) -> Any:
        """Address of one of the barriers in a region of shared memory."""
        return self.region(name)(number * 8)

    def elements(self, name: str, dtype: str) -> Any:
        """A region of shared memory as elements of a type."""
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

    @property
    def flags(self) -> Any:
        """Buffer of flags in global memory, in a kernel whose CTAs wait for one another."""
        return self.buffers[self.plan.state[0].name]

    def placed(self, flags: Flags) -> PlacedFlags:
        """Flags of a phase together with where they lie in memory."""
        return PlacedFlags(flags, self.flags, self.plan.first_flag(flags))

    @contextmanager
    def each_tile(self, phase: PhasePlan) -> Iterator[dict[Any, Any]]:
        """Loop over the tiles of this cluster; yields the values of all places."""
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
        """Loop over the steps of the reduction; yields the step variable's value, and its number.

        The two differ where the CTAs of a cluster begin with their own slices. From step `first` up
        to, not including, `last` if they are given.
        """
        contraction = phase.program.contraction
        loop = ir.script.unroll if unrolled else ir.script.serial
        with loop(first, contraction.steps if last is None else last) as number:
            ir.IRBuilder.name("step", number)
            step = number
            for each in self.plan.features:
                step = each.step(self, phase, step)
            yield {contraction.step: step}, number
