"""Decides everything that a kernel needs to know, before any of it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossfuse.hardware import Device
from crossfuse.lower.hopper.arena import Arena
from crossfuse.lower.hopper.flags import Flags, state
from crossfuse.lower.hopper.gathered import gathered_bytes
from crossfuse.lower.hopper.operand import WARPGROUP_ROWS, Operand
from crossfuse.lower.hopper.phase import PhasePlan, plan_phase
from crossfuse.lower.hopper.sum_program import SumProgram
from crossfuse.lower.hopper.tile_program import TileProgram
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.refusal import refuse

#: Threads of a warpgroup.
WARPGROUP = 128
#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together at most 64 Ki a CTA.
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
_MAX_STAGES = 12
#: Stages of left tiles that cover the latency of L2, from which they mostly come.
_LEFT_STAGES = 4
_ALIGNMENT = 1024
#: Bytes of weights that a CTA has on their way at least: 3 TB/s through 132 SMs for 3 us, the
#: latency of a busy memory. Measured, see docs/hopper.md.
_ON_THEIR_WAY = 72 << 10


@dataclass(frozen=True)
class RingPlan:
    """A ring of stages that all phases go round.

    Attributes
    ----------
    stages : int
        Number of stages.
    pitch : int
        Bytes from one to the next: the most that any phase loads in a step.
    sharers : int
        CTAs that fill stages of one another, in the phase where most do.
    """

    stages: int
    pitch: int
    sharers: int

    @property
    def size(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.pitch


@dataclass(frozen=True)
class KernelPlan:
    """A kernel's decisions.

    Attributes
    ----------
    phases : tuple[PhasePlan, ...]
        What it computes, one after another. Phases after the first wait for flags of earlier ones.
    left, right : RingPlan
        Rings of left tiles, and of the right tiles of all products.
    arena : Arena
        Shared memory: ``left``, ``right``, ``boxes`` (if stored by TMA), ``gathered`` (if an
        intermediate stays in the cluster), ``received`` (if a reduction is split), ``barriers``.
        What is received lies where right tiles were.
    clusters : int
        Clusters launched; each goes through tiles ``c, c + clusters, ...`` of a phase.
    early : bool
        Whether it starts before the kernel before it is over: right tiles are loaded meanwhile.
    number : int
        Of the kernel in its function.
    timed : bool
        Whether it notes when it did what, see `timeline`.
    """

    phases: tuple[PhasePlan, ...]
    left: RingPlan
    right: RingPlan
    arena: Arena
    clusters: int
    early: bool = False
    number: int = 0
    timed: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return self.phases[0].consumers

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.phases[0].program.cluster_size

    @property
    def accumulators(self) -> int:
        """Float32 registers that the widest phase sums in."""
        return max(each.accumulators * len(each.rights) for each in self.phases)

    @property
    def box_pitch(self) -> int:
        """Bytes from the boxes of a warpgroup to the next one's: the most of all phases.

        The place is the same in all phases, since another warpgroup's boxes of the phase before may
        not have left yet.
        """
        return _box_bytes(self.phases)

    @property
    def flags(self) -> tuple[Flags, ...]:
        """Flags of all phases, in the order in which they lie in memory."""
        return tuple(each.raises for each in self.phases if each.raises is not None)

    @property
    def is_persistent(self) -> bool:
        """Whether CTAs wait for one another, so that all have to run at the same time."""
        return bool(self.flags)

    @property
    def on_their_way(self) -> int:
        """Stages of right tiles that are asked for before the first of them has arrived."""
        if not all(operand.streamed for each in self.phases for operand in each.rights):
            return self.right.stages  # what L2 has comes soon enough
        return max(2, -(-_ON_THEIR_WAY // self.right.pitch))

    @property
    def leaves_early(self) -> bool:
        """Whether what CTAs send one another ends before the last tile is stored."""
        return self.cluster_size > 1 and self.clusters == self.phases[-1].program.tiles

    @property
    def summed(self) -> SumProgram | None:
        """What adds the partial tiles of the last phase."""
        return self.phases[-1].program.summed

    @property
    def flag_count(self) -> int:
        """Flags of all phases."""
        return sum(each.count for each in self.flags)

    def first_flag(self, flags: Flags) -> int:
        """Where the flags of a phase begin."""
        return sum(each.count for each in self.flags[: self.flags.index(flags)])

    @property
    def state(self) -> tuple[BufferSpec, ...]:
        """What the kernel keeps from launch to launch."""
        ctas = self.clusters * self.cluster_size
        return (state(self.number, self.flag_count, ctas),) if self.is_persistent else ()

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Descriptors that the kernel takes, each once."""
        return tuple(dict.fromkeys(map_ for each in self.phases for map_ in each.tensor_maps))


def plan_kernel(programs: tuple[TileProgram, ...], device: Device, number: int = 0) -> KernelPlan:
    """Plan a kernel.

    Parameters
    ----------
    programs : tuple[TileProgram, ...]
        Its phases, from `recover`.
    device : Device
        Its shared memory and SMs.
    number : int
        Of the kernel in its function.

    Returns
    -------
    KernelPlan
        For `kernel`.

    Raises
    ------
    LoweringRefused
        If tensor cores or TMA cannot take the tiles, or phases do not fit together.
    """
    phases = _phases(programs)
    clusters = _clusters(phases, device)
    follows = len(phases) == 1 and phases[0].program.follows
    constant = all(each.program.contraction.constant for each in phases)
    return KernelPlan(phases, *_rings(phases, device), clusters, follows or constant, number)


def _phases(programs: tuple[TileProgram, ...]) -> tuple[PhasePlan, ...]:
    phases: list[PhasePlan] = []
    for program in programs:
        left = program.contraction.left
        made = [each.raises for each in phases if each.raises is not None]
        flags = next((each for each in made if each.buffer.same_as(left.buffer)), None)
        if flags is not None:
            flags.check_reader(left, program.analyzer)
        phases.append(plan_phase(program, flags))
    first, *others = phases
    for phase in others:
        found = (phase.consumers, phase.program.cluster_size)
        if found != (first.consumers, first.program.cluster_size):
            raise refuse(
                "grid-stage",
                "phases of one kernel",
                found=f"tiles of {WARPGROUP_ROWS * phase.consumers} rows in clusters of {found[1]}",
                limit=f"{WARPGROUP_ROWS * first.consumers} rows in clusters of "
                f"{first.program.cluster_size}, as in the first phase",
                instead="give all phases tiles of the same rows and one cluster size",
            )
    return _with_distinct_maps(tuple(phases))


def _with_distinct_maps(phases: tuple[PhasePlan, ...]) -> tuple[PhasePlan, ...]:
    """Descriptors of one tensor with different boxes get names of their own."""
    names: dict[TensorMap, str] = {}

    def named(map_: TensorMap) -> TensorMap:
        if map_ not in names:
            taken = sum(each.name == map_.name for each in names)
            names[map_] = f"{map_.name}{taken}" if taken else map_.name
        return replace(map_, name=names[map_])

    def renamed(phase: PhasePlan) -> PhasePlan:
        lefts, rights = (
            tuple(replace(each, map=named(each.map)) for each in group)
            for group in (phase.lefts, phase.rights)
        )
        store = phase.store.with_maps(named)
        return replace(phase, left=lefts[0] if lefts else None, rights=rights, store=store)

    return tuple(map(renamed, phases))


def _clusters(phases: tuple[PhasePlan, ...], device: Device) -> int:
    """Clusters that find room; as many as tiles where a cluster has to compute just one."""
    room = device.resident_clusters(phases[0].program.cluster_size)
    if any(each.program.gives for each in phases):
        # A cluster has room for what it gathers once; others take their turn on the GPU.
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
    clusters = min(room, max(each.program.tiles for each in phases))
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


def _rings(phases: tuple[PhasePlan, ...], device: Device) -> tuple[RingPlan, RingPlan, Arena]:
    """As many stages as fit, or as many as were asked for."""
    left, right = _ring([each.lefts for each in phases]), _ring([each.rights for each in phases])
    wanted = max(each.program.contraction.stages for each in phases)
    options = [wanted] if wanted else list(range(_MAX_STAGES, 1, -1))
    for stages in options:
        # Right tiles come from far away: left ones get what these leave, if it is enough.
        fewest = stages if wanted else min(stages, _LEFT_STAGES)
        for fewer in range(stages, fewest - 1, -1):
            rings = replace(left, stages=fewer), replace(right, stages=stages)
            arena = _arena(phases, *rings)
            if arena.size <= device.max_shared_bytes:
                return (*rings, arena)
    least = _arena(phases, *rings)
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{least.size} bytes for {options[-1]} stages of {left.pitch + right.pitch} bytes",
        limit=f"{device.max_shared_bytes} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )


def _ring(loaded: list[tuple[Operand, ...]]) -> RingPlan:
    """The ring of some operands of each phase, without its stages."""
    pitch = max(sum(operand.size for operand in each) for each in loaded)
    sharers = max(operand.sharers for each in loaded for operand in each)
    return RingPlan(0, pitch, sharers)


def _arena(phases: tuple[PhasePlan, ...], left: RingPlan, right: RingPlan) -> Arena:
    """Where everything lies; what peers send takes the place of right tiles that are used up."""
    received = max((_received_bytes(each) for each in phases), default=0)
    arena = Arena()
    boxes = _box_bytes(phases) * phases[0].consumers
    if boxes:
        arena = arena.with_region("boxes", boxes, _ALIGNMENT)
    gathered = max(gathered_bytes(each.program.takes, each.consumers) for each in phases)
    if gathered:
        arena = arena.with_region("gathered", gathered, _ALIGNMENT)
        arena = arena.with_region("gather_barriers", 8 * phases[0].consumers, 8)
    arena = arena.with_region("left", left.size, _ALIGNMENT)
    arena = arena.with_region("right", max(right.size, received), _ALIGNMENT)
    if received:
        arena = arena.with_alias("received", "right", received)
        arena = arena.with_region("exchange_barriers", 16, 8)
    if phases[-1].program.summed is not None:
        arena = arena.with_region("sum_barrier", 8, 8)
    return arena.with_region("barriers", 16 * (left.stages + right.stages), 8)


def _box_bytes(phases: tuple[PhasePlan, ...]) -> int:
    """What a warpgroup stages of its tiles, in any phase."""
    return max(each.store.slot_bytes for each in phases)


def _received_bytes(phase: PhasePlan) -> int:
    """What the CTAs of the cluster send to one."""
    exchange = phase.program.exchange
    return 0 if exchange is None else exchange.place.extent * phase.slice_bytes
