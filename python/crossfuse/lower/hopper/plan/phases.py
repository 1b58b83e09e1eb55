"""The phases of a kernel: planned one after another, so that they fit together."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.lower.hopper.plan.phase import PhasePlan, plan_phase
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.rows.chunk_plan import plan_chunks
from crossfuse.lower.hopper.rows.room import check_room
from crossfuse.lower.hopper.sync.flags import Flags
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse


def plan_phases(programs: tuple[TileProgram, ...]) -> tuple[PhasePlan, ...]:
    """Plan the phases of a kernel, each with the flags that it waits for.

    Parameters
    ----------
    programs : tuple[TileProgram, ...]
        One for each phase, in order.

    Returns
    -------
    tuple[PhasePlan, ...]
        In the same order; descriptors that differ have names that differ.

    Raises
    ------
    LoweringRefused
        If tensor cores or TMA cannot take the tiles of a phase, it does not read what an earlier
        one makes, or phases have tiles of different rows or clusters of different sizes.
    """
    phases: list[PhasePlan] = []
    for program in programs:
        left = program.contraction.left
        made = [each.raises for each in phases if each.raises is not None]
        flags = next((each for each in made if each.buffer.same_as(left.buffer)), None)
        if program.rows is not None:
            chunks = plan_chunks(program)
            flags = (
                Flags.of_rows(program.rows, left.shape[0])
                if chunks is None
                else Flags.of_chunks(program.rows, chunks)
            )
        if flags is not None:
            flags.check_reader(left, program.analyzer)
        phases.append(plan_phase(program, flags))
        if program.rows is not None:
            check_room(phases[-1])
    first, *others = phases
    for phase in others:
        found = (phase.warpgroups, phase.program.cluster_size)
        if found != (first.warpgroups, first.program.cluster_size):
            raise refuse(
                "grid-stage",
                "phases of one kernel",
                found=f"tiles of {phase.warpgroups.rows} rows in clusters of {found[1]}",
                limit=f"{first.warpgroups.rows} rows in clusters of "
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
        lefts, rights, others = (
            tuple(replace(each, map=named(each.map)) for each in group)
            for group in (phase.lefts, phase.rights, phase.others)
        )
        store = phase.store.with_maps(named)
        left = lefts[0] if lefts else None
        return replace(phase, left=left, rights=rights, others=others, store=store)

    return tuple(map(renamed, phases))
