"""From a candidate to its schedule."""

from __future__ import annotations

import json
from typing import Any

from crossfuse.hardware import Device
from crossfuse.meta_schedule.candidate import Candidate


def schedule_candidate(candidate: Candidate, target: Device) -> Any:
    """Schedule a candidate; its weights are constant, as they are while it is timed.

    Parameters
    ----------
    candidate : Candidate
        Of any family but ``eager``.
    target : Device
        What the rules count CTAs of.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the tiles are no fields of the family's, or the rule has no such schedule.
    """
    from crossfuse.schedule.families import schedule_family
    from crossfuse.workload.build import prim_func
    from crossfuse.workload.spec_text import parse

    func = prim_func(parse(candidate.spec))
    if candidate.family == "trace":
        return _replayed(candidate, func)
    return schedule_family(
        func,
        candidate.family,
        candidate.tiles,
        target,
        constant_weights=True,
        options=candidate.options,
    )


def _replayed(candidate: Candidate, func: Any) -> Any:
    from crossfuse import _tvm as ir
    from crossfuse.schedule.install import install

    install()
    sch = ir.Schedule(func)
    ir.s_tir.schedule.Trace.apply_json_to_schedule(list(candidate.trace), sch)
    return sch


def candidate_of(spec: str, schedule: Any) -> Candidate:
    """A finished schedule as a candidate.

    Parameters
    ----------
    spec : str
        Text of the workload whose function was scheduled.
    schedule : tvm.s_tir.Schedule
        The schedule, with its trace.

    Returns
    -------
    Candidate
        Of family ``trace``.
    """
    from crossfuse.schedule.trace_json import trace_json

    return Candidate(spec, "trace", trace=json.loads(trace_json(schedule.trace)))
