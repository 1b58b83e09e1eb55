"""Divides a CTA's shared memory: rings, receive buffers, and the arena that holds all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse.hardware import Device
from crossfuse.lower.hopper.plan.operands import Operand
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.memory import (
    ALIGNMENT,
    BARRIER,
    LEAST_STAGES,
    STAGE_BARRIERS,
    divide,
    place_of_received,
)

if TYPE_CHECKING:
    from crossfuse.lower.hopper.features.feature import Feature


@dataclass(frozen=True)
class Region:
    """A named piece of shared memory, in bytes."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Piece:
    """Shared memory that a feature of a kernel asks for."""

    name: str
    #: In bytes, as its alignment is.
    size: int
    alignment: int = BARRIER


@dataclass(frozen=True)
class Arena:
    """Regions one after another, in the order of their addition, and aliases in their place."""

    regions: tuple[Region, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return max((each.end for each in self.regions), default=0)

    def __contains__(self, name: str) -> bool:
        return any(each.name == name for each in self.regions)

    def __getitem__(self, name: str) -> Region:
        return next(each for each in self.regions if each.name == name)

    def with_pieces(self, pieces: Iterable[Piece]) -> Arena:
        """An arena that has some more regions."""
        return reduce(lambda arena, x: arena.with_region(x.name, x.size, x.alignment), pieces, self)

    def with_region(self, name: str, size: int, alignment: int) -> Arena:
        """An arena that has one more region, of `size` bytes.

        The `alignment` of its offset is 1024 for tiles with a 128-byte swizzle, 8 for barriers.
        """
        offset = -(-self.size // alignment) * alignment
        return Arena((*self.regions, Region(name, offset, size)))

    def with_alias(self, name: str, other: str, size: int) -> Arena:
        """An arena with a region that begins where another does, which is not in use any more then.

        At most of its size.
        """
        return Arena((*self.regions, Region(name, self[other].offset, size)))


# Fillers: the CTAs that fill stages of a CTA's ring, and so must be signalled that one is empty.
#
# CTAs that share a tile fill stages of one another. All phases share one ring, so what is loaded
# next into a stage may belong to the next phase, where more CTAs share:
#
# ```
# phase 0, A is not shared          phase 1, hidden is shared by CTAs 0 and 8
# CTA 0 multiplies stage 3    <--   CTA 8 loads its half of a tile into stage 3 of both
# ```
#
# CTA 0 must have signalled the stage to CTA 8 in phase 0 already.

#: Places in the cluster; CTAs that differ in these alone fill stages of one another.
Fillers = tuple[Place, ...]


def fillers_of(
    phases: Iterable[tuple[TileProgram, tuple[Operand, ...]]],
) -> tuple[Fillers, ...]:
    """The CTAs that fill a stage in each phase or in a later one, as places of its own cluster.

    The first phase has the most. `phases` are those operands of each that the ring holds.
    """
    axes: set[str] = set()
    found: list[Fillers] = []
    for program, operands in reversed(tuple(phases)):
        axes |= {place.tag for operand in operands for place in operand.shared_by}
        found.append(tuple(place for place in program.cluster if place.tag in axes))
    return tuple(reversed(found))


def count(fillers: Fillers) -> int:
    """Number of CTAs that fill a stage."""
    return prod(each.extent for each in fillers)


@dataclass(frozen=True)
class RingPlan:
    """A ring of stages that all phases use in turn."""

    stages: int
    #: Bytes from one stage to the next: the most that any phase loads in a step.
    pitch: int
    #: For each phase, the CTAs that are told of an empty stage.
    fillers: tuple[Fillers, ...]

    @property
    def sharers(self) -> int:
        """Number of CTAs that fill stages of one another, in the phase where most do."""
        return max(map(count, self.fillers))

    @property
    def size(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.pitch


def plan_memory(
    phases: tuple[PhasePlan, ...], features: tuple[Feature, ...], device: Device
) -> tuple[RingPlan, RingPlan, Arena]:
    """Divide shared memory into the rings of left and right tiles and an arena that holds all.

    As many stages as fit, or as many as were asked for. Refused if two do not fit, or fewer are
    asked for than can work.
    """
    wanted = _wanted_stages(phases)
    left = _ring([(each.program, each.lefts) for each in phases])
    right = _ring([(each.program, each.rights) for each in phases])
    limit = device.max_shared_bytes

    def with_stages(lefts: int, rights: int) -> tuple[RingPlan, RingPlan, Arena]:
        rings = replace(left, stages=lefts), replace(right, stages=rights)
        return (*rings, _arena(phases, features, *rings))

    def size(lefts: Any, rights: Any) -> int:
        return with_stages(lefts, rights)[-1].size

    held = max(each.store.pages for each in phases)
    fewest = wanted or max(held, LEAST_STAGES)
    chosen: Any = (wanted, wanted) if wanted else divide(size, held, limit)
    if 0 not in chosen and size(*chosen) <= limit:
        return with_stages(*chosen)
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{size(fewest, fewest)} bytes for {fewest} stages of {left.pitch + right.pitch} "
        "bytes",
        limit=f"{limit} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )


def _wanted_stages(phases: tuple[PhasePlan, ...]) -> int:
    """Stages that the schedule asks for; 0 if it leaves them open."""
    wanted = max(each.program.contraction.stages for each in phases)
    steps = max(each.program.contraction.steps for each in phases)
    if not 0 < wanted < min(LEAST_STAGES, steps):
        return wanted
    # A stage is handed back once the products of the step after it have begun.
    raise refuse(
        "stages",
        f"loop '{phases[0].program.contraction.step.name}'",
        found=f"{wanted} stage for {steps} steps",
        limit=f"{LEAST_STAGES} or more: a tile is held until the one after it is multiplied",
        instead=f"annotate the loop with {LEAST_STAGES} stages, or 0 for as many as fit",
    )


def _ring(loaded: list[tuple[TileProgram, tuple[Operand, ...]]]) -> RingPlan:
    """The ring of some operands of each phase, its number of stages still open."""
    pitch = max(sum(operand.size for operand in each) for _, each in loaded)
    return RingPlan(0, pitch, fillers_of(loaded))


def _arena(
    phases: tuple[PhasePlan, ...], features: tuple[Feature, ...], left: RingPlan, right: RingPlan
) -> Arena:
    """Where everything lies; what peers send takes the place of tiles that are used up.

    That of right tiles if it is enough; with several blocks of rows, that of left tiles too.
    """
    received = max((each.received for each in features), default=0)
    arena = Arena()
    boxes = box_bytes(phases) * phases[0].consumers
    if boxes:
        arena = arena.with_region("boxes", boxes, ALIGNMENT)
    arena = arena.with_pieces(piece for each in features for piece in each.before_tiles)
    arena = arena.with_region("left", left.size, ALIGNMENT)
    tall = phases[0].blocks > 1
    room, spread = place_of_received(left.size, right.size, received, tall)
    arena = arena.with_region("right", int(room), ALIGNMENT)
    if received:
        arena = arena.with_alias("received", "left" if spread else "right", received)
    arena = arena.with_pieces(piece for each in features for piece in each.behind_tiles)
    arena = arena.with_pieces(piece for each in features for piece in each.behind_all(left.stages))
    barriers = STAGE_BARRIERS * (left.stages + right.stages)
    return arena.with_region("barriers", barriers, BARRIER)


def box_bytes(phases: tuple[PhasePlan, ...]) -> int:
    """Bytes of a warpgroup's boxes in a place of their own, the most of any phase."""
    return max(each.store.own_bytes for each in phases)
