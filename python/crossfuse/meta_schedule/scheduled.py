"""Schedules candidates."""

from __future__ import annotations

from typing import Any

from crossfuse.hardware import Device, device
from crossfuse.meta_schedule.candidate import TRACE, Candidate
from crossfuse.planner.cascade.shape import shape_of_cascade
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.registry import CASCADE_FAMILIES, FAMILIES
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.tune.kernel_space import Space, cascade_space_of, space_of
from crossfuse.schema import parse
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec


def schedule_candidate(candidate: Candidate, target: Device) -> Any:
    """Schedule a candidate; its weights are constant, as they are while it is timed.

    The family ``eager`` has no schedule. It is refused if the tiles are no fields of the family's,
    or the rule has no such schedule.
    """
    from crossfuse.schedule.planned import schedule_cascade_of

    func = function_of(candidate.spec)
    if candidate.family in CASCADE_FAMILIES:
        return schedule_cascade_of(func, candidate.family, candidate.tiles, constant_weights=True)
    if candidate.family == TRACE:
        return _replayed(candidate, func)
    family = FAMILIES[candidate.family]
    return family.schedule(func, candidate.tiles, target, constant_weights=True)


def function_of(spec: str) -> Any:
    """The unscheduled function of a spec, of a chain or of a cascade."""
    from crossfuse.planner.cascade.shape import function_of as cascade_function
    from crossfuse.workload import build, cascades, suites

    if cascades.names_one(spec):
        return cascade_function(cascades.parse(spec))
    return build.prim_func(suites.parse(spec))


def replayable(candidate: Candidate, target: Device) -> Any:
    """A schedule of the candidate's function whose trace a database can store and replay.

    The schedule of a cascade is one of its stream, which is another function; stored is the plan,
    as an annotation by which `crossfuse.compile(..., database=...)` schedules it. See
    `schedule_candidate`, also for what is refused.
    """
    if candidate.family not in CASCADE_FAMILIES:
        return schedule_candidate(candidate, target)
    from crossfuse import _tvm as ir
    from crossfuse.schedule.records import annotate_plan

    sch = ir.Schedule(function_of(candidate.spec))
    annotate_plan(sch, candidate.family, candidate.tiles)
    return sch


def _replayed(candidate: Candidate, func: Any) -> Any:
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    ir.s_tir.schedule.Trace.apply_json_to_schedule(list(candidate.trace), sch)
    return sch


def candidate_of(spec: str, schedule: Any) -> Candidate:
    """A finished schedule of a workload's function as a candidate of family ``trace``."""
    from crossfuse.schedule.records import trace_json

    return Candidate(spec, TRACE, trace=parse(trace_json(schedule.trace)))


# The kernels of a chain or of a cascade as candidates.


def kernels_of(spec: WorkloadSpec | CascadeSpec, target: str) -> Space:
    """The space of all kernels of a workload.

    See `crossfuse.planner.tune.kernel_space.space_of`, and for cascades
    `crossfuse.planner.tune.kernel_space.cascade_space_of`.
    """
    known = device(target)
    if isinstance(spec, CascadeSpec):
        return cascade_space_of(shape_of_cascade(spec), known, rates_of(known))
    shape = shape_of(chain_of(spec), k_major=spec.weights == "nk")
    return space_of(shape, known, rates_of(known))


def best_candidates(spec: WorkloadSpec | CascadeSpec, target: str, count: int) -> list[Candidate]:
    """At most `count` kernels of a workload, the best by the estimate."""
    space = kernels_of(spec, target)
    return [candidate_at(space, str(spec), int(each)) for each in space.order[:count]]


def candidate_at(space: Space, spec: str, point: int) -> Candidate:
    """A point of a workload's space of kernels as a candidate, with its estimate as a note."""
    family, tiles = space.tiles(point)
    notes = {"estimate": round(float(space.prior[point]), 3)}
    return Candidate(spec, family, tiles, notes=notes)
