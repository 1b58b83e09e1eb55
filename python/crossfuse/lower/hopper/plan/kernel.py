"""Plans a whole kernel: phases, memory, launch and flags, before any of it is emitted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any

from crossfuse.hardware import WARPGROUP, Device
from crossfuse.lower.hopper.epilogue.elements import further_of
from crossfuse.lower.hopper.features.exchange import SplitSum, SumOfParts
from crossfuse.lower.hopper.features.feature import Feature, first_of
from crossfuse.lower.hopper.features.intermediate import Gathering, KeptLeft
from crossfuse.lower.hopper.flags import Flags, state
from crossfuse.lower.hopper.plan.phase import PhasePlan, box_bytes, plan_phases
from crossfuse.lower.hopper.plan.tiles import Operand
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.reduced import RowsReduced
from crossfuse.lower.hopper.rows.feature import Rows
from crossfuse.lower.hopper.stream.feature import Streamed
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.memory import (
    ALIGNMENT,
    BARRIER,
    LEAST_STAGES,
    ON_THEIR_WAY,
    STAGE_BARRIERS,
    Arena,
    divide,
    place_of_received,
)

#: All that a kernel may have, in the order in which it is asked for.
_FEATURES = (SumOfParts, Rows, Streamed, SplitSum, Gathering, KeptLeft, RowsReduced)


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


def filler_count(fillers: Fillers) -> int:
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
        return max(map(filler_count, self.fillers))

    @property
    def size(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.pitch


@dataclass(frozen=True)
class KernelPlan:
    """All decisions about a kernel."""

    #: In the order of execution. Phases after the first wait for flags of earlier ones.
    phases: tuple[PhasePlan, ...]
    #: What it has beside its rings of tiles.
    features: tuple[Feature, ...]
    #: Ring of left tiles.
    left: RingPlan
    #: Ring of the right tiles of all products.
    right: RingPlan
    #: Shared memory: ``left``, ``right``, ``boxes`` (if stored by TMA), ``row_states`` (if warps
    #: that make a row pass one another states), ``barriers``, and what its features ask for. What
    #: CTAs send, ``received``, lies where right tiles were; where left tiles were too, if it needs
    #: more.
    arena: Arena
    #: Clusters launched; each goes through tiles ``c, c + clusters, ...`` of a phase.
    clusters: int
    #: Whether it starts before the preceding kernel is over, to load right tiles meanwhile.
    early: bool = False
    #: Of the kernel in its function.
    number: int = 0
    #: Whether it records when it did what, see `timeline`.
    timed: bool = False

    def with_feature(self, old: Feature, new: Feature) -> KernelPlan:
        """The plan with another feature in the place of one."""
        return replace(self, features=tuple(new if e is old else e for e in self.features))

    @property
    def consumers(self) -> int:
        """Number of warpgroups that multiply."""
        return self.phases[0].consumers

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that each of them multiplies."""
        return self.phases[0].blocks

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumers + 1 + sum(each.warpgroups for each in self.features))

    @property
    def cluster_size(self) -> int:
        """Number of CTAs in a cluster."""
        return self.phases[0].program.cluster_size

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that multiplies; 0 as launched."""
        return first_of(each.registers for each in self.features) or self.phases[0].registers

    @property
    def accumulators(self) -> int:
        """Float32 registers that the widest phase sums in."""
        return max(each.sums for each in self.phases)

    @property
    def fast(self) -> bool:
        """Whether functions are computed in 16 bits."""
        return any(each.fast for each in self.features)

    @property
    def held(self) -> int:
        """Registers of a thread that features have in use beside the sums."""
        return sum(each.held for each in self.features)

    @property
    def box_pitch(self) -> int:
        """Bytes from the boxes of a warpgroup to the next one's: the most of all phases.

        0 if they lie in left stages. The place is the same in all phases, since another warpgroup's
        boxes of the preceding phase may not have left yet.
        """
        return box_bytes(self.phases)

    @property
    def flags(self) -> tuple[Flags, ...]:
        """Flags of all phases, in the order in which they lie in memory."""
        found = (flags for each in self.phases for flags in (each.awaits, each.raises))
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs wait for one another."""
        return bool(self.flags)

    @property
    def helps(self) -> bool:
        """Whether a CTA waits for no other one, and need not run at the same time."""
        return any(each.helps for each in self.features)

    @property
    def on_their_way(self) -> int:
        """Stages of right tiles that may be in flight before the first of them has arrived."""
        if not all(operand.streamed for each in self.phases for operand in each.rights):
            return self.right.stages  # what L2 has comes soon enough
        return min(self.right.stages, max(2, -(-ON_THEIR_WAY // self.asked_for)))

    @property
    def asked_for(self) -> int:
        """Bytes of a stage of right tiles that this CTA loads itself, without its peers' parts."""
        return max(sum(x.size // x.sharers for x in each.rights) for each in self.phases)

    @property
    def is_awaited_by_all(self) -> bool:
        """Whether the warpgroups that multiply wait for the preceding kernel, too.

        It may still be writing what epilogues read besides the sums: nothing says that these are
        constant, and they are read before the first left tile has come.
        """
        further = any(further_of(each.program) for each in self.phases)
        return self.early and (further or any(each.reads_early for each in self.features))

    @property
    def leaves_early(self) -> bool:
        """Whether the exchange between CTAs ends before the last tile is stored."""
        return self.cluster_size > 1 and self.clusters == self.phases[-1].program.tiles

    @property
    def flag_count(self) -> int:
        """Number of flags of all phases."""
        return sum(each.count for each in self.flags)

    def first_flag(self, flags: Flags) -> int:
        """Index of the first flag of a phase."""
        return sum(each.count for each in self.flags[: self.flags.index(flags)])

    @property
    def state(self) -> tuple[BufferSpec, ...]:
        """Buffers whose contents live from launch to launch."""
        ctas = self.clusters * self.cluster_size
        return (state(self.number, self.flag_count, ctas),) if self.is_persistent else ()

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Buffers of the function that the kernel takes, each once."""
        found = (each for phase in self.phases for each in phase.program.parameters)
        return tuple(dict.fromkeys(found))

    @property
    def row_count(self) -> Any:
        """The parameter that tells how many rows there are; None if there are always all."""
        rows = self.phases[0].program.store.rows
        return None if rows is None else rows.count

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Descriptors that the kernel takes, each once."""
        maps = [map_ for each in self.phases for map_ in each.tensor_maps]
        maps += [map_ for each in self.features for map_ in each.tensor_maps]
        return tuple(dict.fromkeys(maps))

    @property
    def workspaces(self) -> tuple[BufferSpec, ...]:
        """Buffers in global memory for the kernel itself, for one launch."""
        return tuple(buffer for each in self.features for buffer in each.workspaces)


def plan_kernel(
    programs: tuple[TileProgram, ...],
    device: Device,
    number: int = 0,
    constant: Collection[str] | None = None,
) -> KernelPlan:
    """Plan a kernel from its phases, as `recover` reads them; refused if they do not fit together.

    Also refused if tensor cores or TMA cannot take the tiles. `number` is that of the kernel in its
    function. With `constant` it starts before a kernel of another function is over, and no kernel
    that may still be running writes the buffers that are named there; None: before one of its own
    at most, when all that the function reads is there.
    """
    phases = plan_phases(programs)
    clusters = _clusters(phases, device)
    if _are_apart(phases):
        phases = _in_turns(phases, clusters)
    follows = len(phases) == 1 and phases[0].program.follows
    found = (each.found_in(phases, device) for each in _FEATURES)
    features = tuple(each for each in found if each is not None)
    ready = all(_has_constant_weights(each, constant or ()) for each in phases)
    alone = follows and constant is None
    early = alone or (ready and all(each.may_start_early for each in features))
    memory = plan_memory(phases, features, device)
    plan = KernelPlan(phases, features, *memory, clusters, early, number)
    return reduce(lambda known, each: each.settled(known, device), features, plan)


def _has_constant_weights(phase: PhasePlan, constant: Collection[str]) -> bool:
    """Whether no kernel that may still be running writes the right operands of a phase."""
    named = all(each.map.buffer in constant for each in phase.rights)
    return phase.program.contraction.constant or named


def _are_apart(phases: tuple[PhasePlan, ...]) -> bool:
    """Whether there are several phases, and none needs anything that another one makes."""
    passed = (each.program.gives or each.program.keeps or each.awaits for each in phases)
    return len(phases) > 1 and not any(passed)


def _in_turns(phases: tuple[PhasePlan, ...], clusters: int) -> tuple[PhasePlan, ...]:
    """Phases that need nothing of each other: their tiles are dealt out as if they were of one."""
    ends = accumulate(each.program.tiles for each in phases)
    return tuple(
        replace(each, first=(end - each.program.tiles) % clusters)
        for each, end in zip(phases, ends, strict=True)
    )


def _clusters(phases: tuple[PhasePlan, ...], device: Device) -> int:
    """Number of clusters that are resident; that of tiles where a cluster computes just one."""
    room = device.resident_clusters(phases[0].program.cluster_size)
    if any(each.program.gives or each.program.keeps for each in phases):
        # A cluster has room for what it gathers or keeps once; others take their turn on the GPU.
        clusters = max(each.program.tiles for each in phases)
        if clusters > room and phases[-1].raises is not None:
            raise refuse(
                "grid-stage",
                f"clusters of {phases[0].program.cluster_size} on {device.name}",
                found=f"{clusters} clusters that wait for one another's sums",
                limit=f"{room} clusters that run at the same time",
                instead="take fewer parts or larger tiles",
            )
        return clusters
    every = [each.program.tiles for each in phases]
    clusters = min(room, sum(every) if _are_apart(phases) else max(every))
    split = [each.program for each in phases if each.program.exchange is not None]
    # What peers send has one place: a cluster computes one tile.
    needed = max((each.tiles for each in split), default=clusters)
    if len(phases) > 1 and needed > room:
        raise refuse(
            "grid-stage",
            f"clusters of {phases[0].program.cluster_size} on {device.name}",
            found=f"{needed} tiles of a split reduction",
            limit=f"{room} clusters that run at the same time, each with one tile",
            instead="take wider tiles, or leave grid_stage out",
        )
    return max(clusters, needed)


# Shared memory: the rings of left and right tiles, and an arena that holds all.


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
