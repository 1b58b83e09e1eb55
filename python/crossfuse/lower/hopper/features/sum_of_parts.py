"""The sum of partial tiles of several clusters, in the order of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP, Device
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.epilogue.elements import Elements, Units, further_of
from crossfuse.lower.hopper.features.feature import ConsumerPart, Feature
from crossfuse.lower.hopper.flags import PlacedFlags
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.program.tile_program import UNIT, SumProgram
from crossfuse.lower.hopper.statements import (
    Coordinates,
    Warmup,
    at,
    let,
    registers,
    run,
    unravel,
    when,
)
from crossfuse.planner.kernels.memory import BARRIER, Piece

if TYPE_CHECKING:
    from crossfuse.lower.hopper.roles import Body

#: Vector suffix of an instruction, by the number of neighbours.
_VECTORS = {4: "v4.", 2: "v2.", 1: ""}
# A lane for each part; what all of them saw is known to the lane that goes on.
_AWAIT = """\
__device__ __forceinline__ void crossfuse_await_parts(const void* flags, int pitch, int parts,
                                                      unsigned target) {
  for (int part = threadIdx.x & 31; part < parts; part += 32) {
    const unsigned* flag = (const unsigned*)flags + part * pitch;
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while (seen != target);
  }
  __syncwarp();
}
"""


def _places(body: Body, program: SumProgram) -> dict[Any, Any]:
    """Values of the places of the sum of partial tiles; each cluster has one tile."""
    return unravel(program.places, body.where.cluster, body.where.rank)


def await_parts(
    program: SumProgram, placed: PlacedFlags, launch: Any, values: Mapping[Any, Any]
) -> None:
    """Wait until all parts of this CTA's tile are stored; a whole warp calls it.

    `launch` is the number of launches before this one, `values` are those of the variables of
    places.
    """
    flags = placed.flags
    row, column = (at(each, values) for each in program.first)
    down, across = row // flags.rows, column // flags.columns
    first = down * flags.across + across
    # A tile beyond the output has no flags, and nobody adds it.
    starts = (down * flags.rows, across * flags.columns)
    inside = [
        start < extent
        for dimension, (start, extent) in enumerate(
            zip(starts, program.store.tile.extents, strict=True)
        )
        if not program.begins_inside(dimension)
    ]
    with when(ir.conjunction(inside)) if inside else nullcontext():
        run(
            ir.cuda_func_call(
                "crossfuse_await_parts",
                placed.address(first),
                ir.script.int32(flags.down * flags.across),
                ir.script.int32(flags.parts),
                (launch + ir.script.uint32(1)) * ir.script.uint32(flags.raisers),
                source_code=_AWAIT,
            )
        )


class Sum:
    """Adds a CTA's slice of all parts, and stores the epilogue's values of it.

    ::

        before, in L2                  each CTA                     after
        part 0: tile [64, 96]          adds its rows of part 0,
        part 1: tile [64, 96]          1, 2, ... in this order      out: tile [64, 96]
        ...

    `threads` are those of a CTA that multiply.
    """

    def __init__(
        self, program: SumProgram, where: Coordinates, threads: int, warmup: Warmup
    ) -> None:
        self.program = program
        self.threads = threads
        self.me = let("thread_of_sum", (where.warpgroup - 1) * WARPGROUP + where.thread)
        self.warmup = warmup
        # Rows that are no multiple of a vector begin anywhere, and a vector would leave them.
        self.width = gcd(UNIT, int(program.partial.shape[-1]))
        self.elements = Elements(program, (program.has_tail(0), program.has_tail(1)))

    def store(self, ready: Any, values: Mapping[Any, Any]) -> None:
        """Wait at the barrier `ready`, then add and store; `values` are those of places."""
        ahead = self._units(values)
        ahead.start(self.me)
        with self.warmup.skipped():
            mbarrier.wait(ready, 0)
        total = registers("total", UNIT, "float32")
        part = registers("part", UNIT, "float32")
        units = ahead.count
        with ir.script.serial(0, -(-units // self.threads)) as turn:
            ir.IRBuilder.name("turn_of_sum", turn)
            unit = let("unit", turn * self.threads + self.me)
            with when(unit < units) if units % self.threads else nullcontext():
                row, column = self._place(unit, values)
                self._add(row, column, total, part)
                for first in range(0, UNIT, 2):
                    low, high = (total[first],), (total[first + 1],)
                    pairs = ahead.pairs[first // 2]
                    self.elements.store_pair(row, column + first, low, high, self.warmup, pairs)
                ahead.advance(unit)

    def _place(self, unit: Any, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Row and column of the first element of a unit."""
        element = {self.program.element: unit * UNIT}
        row, column = (at(each, values, element) for each in self.program.index)
        return let("row", row), let("column", column)

    def _units(self, values: Mapping[Any, Any]) -> Units:
        """Prefetches the further operands of this CTA's slice."""

        def places(unit: Any) -> list[tuple[Any, Any]]:
            row, column = self._place(unit, values)
            return [(row, column + first) for first in range(0, UNIT, 2)]

        count = self.program.elements // UNIT
        return Units(self.elements, count, self.threads, UNIT // 2, places, self.warmup)

    def _add(self, row: Any, column: Any, total: Any, part: Any) -> None:
        """Add a unit of all parts; several loads are in flight at once."""
        for each in range(UNIT):
            ir.script.buffer_store(total, ir.script.float32(0), [each])
        for offset in range(0, UNIT, self.width):
            with self._existing(row, column + offset):
                self._add_neighbours(row, column, offset, total, part)

    def _add_neighbours(self, row: Any, column: Any, offset: int, total: Any, part: Any) -> None:
        """Add as many neighbours of a unit, from `offset` on, as one load takes."""
        into = range(offset, offset + self.width)
        with ir.script.unroll(0, self.program.parts) as number:
            ir.IRBuilder.name("number", number)
            self._load(part, into, self.program.partial.ptr_to([number, row, column + offset]))
            for each in into:
                ir.script.buffer_store(total, total[each] + part[each], [each])

    def _load(self, registers: Any, into: Iterable[int], place: Any) -> None:
        load = ir.script.ptx[f"ld.global.{_VECTORS[self.width]}f32"]
        run(load(*[registers[each] for each in into], place))

    @contextmanager
    def _existing(self, row: Any, column: Any) -> Iterator[None]:
        """Context for statements on what begins within the output, outside the warm-up."""
        inside = self.elements.inside(row, column)
        with self.warmup.skipped(), when(ir.conjunction(inside)) if inside else nullcontext():
            yield


class _Part(ConsumerPart):
    def finish(self, warmup: Warmup) -> None:
        """Add a slice of all parts."""
        body, program = self.body, self.body.plan.phases[-1].program.summed
        assert program is not None
        total = Sum(program, body.where, WARPGROUP * body.plan.consumers, warmup)
        total.store(body.memory.barrier("sum_barrier"), _places(body, program))
        body.timeline.stamp("summed")


@dataclass(frozen=True)
class SumOfParts(Feature):
    """Clusters make partial tiles of the last phase; when all are stored, each CTA adds a slice."""

    asked_by: ClassVar = "summed"
    part: ClassVar = _Part
    events_behind = ("summed",)
    barriers = ("sum_barrier",)
    reads_early: bool

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int], device: Device) -> SumOfParts:
        """Of the last phase."""
        summed = phases[-1].program.summed
        assert summed is not None
        return cls(bool(further_of(summed)))

    def behind_all(self, stages: int) -> tuple[Piece, ...]:
        """The barrier that completes when all parts of this CTA's tile are stored."""
        return (Piece("sum_barrier", BARRIER),)

    def loaded(self, body: Body, launch: Any) -> None:
        """Wait for all parts, where nothing is left to load."""
        phase = body.plan.phases[-1]
        flags, program = phase.raises, phase.program.summed
        assert flags is not None and program is not None
        with body.each_tile(phase) as places:
            values = places | _places(body, program)
            await_parts(program, body.placed(flags), launch, values)
            with when(body.where.lane == 0):
                mbarrier.arrive(body.memory.barrier("sum_barrier"))
