"""From a candidate to its schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
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
    from crossfuse.workload.build import prim_func
    from crossfuse.workload.spec_text import parse

    func = prim_func(parse(candidate.spec))
    return _RULES[candidate.family](candidate, func, target)


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


def _gemm(candidate: Candidate, func: Any, target: Device) -> Any:
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles
    from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm

    tiles = _tiles(TensorTiles, candidate.tiles, candidate)
    return schedule_tiled_gemm(func, tiles=tiles, constant_weights=True)


def _registers(candidate: Candidate, func: Any, target: Device) -> Any:
    from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
    from crossfuse.schedule.rules.register_tiles import RegisterTiles

    tiles = _tiles(RegisterTiles, candidate.tiles, candidate)
    return schedule_register_ffn(
        func, tiles=tiles, constant_weights=True, target=target, **candidate.options
    )


def _dsm(candidate: Candidate, func: Any, target: Device) -> Any:
    from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
    from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn

    tiles = _tiles(ClusterTiles, candidate.tiles, candidate)
    return schedule_clustered_ffn(
        func, tiles=tiles, constant_weights=True, target=target, **candidate.options
    )


def _phases(candidate: Candidate, func: Any, target: Device) -> Any:
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles
    from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn

    given = candidate.tiles
    if unknown := given.keys() - {"first", "second"}:
        raise _unknown(candidate, unknown, ("first", "second"))
    first, second = (
        _tiles(TensorTiles, given.get(phase, {}), candidate) for phase in ("first", "second")
    )
    return schedule_tiled_ffn(
        func,
        first=first,
        second=second,
        staged=candidate.family == "l2",
        constant_weights=True,
        **candidate.options,
    )


def _trace(candidate: Candidate, func: Any, target: Device) -> Any:
    from crossfuse import _tvm as ir
    from crossfuse.schedule.install import install

    install()
    sch = ir.Schedule(func)
    ir.s_tir.schedule.Trace.apply_json_to_schedule(list(candidate.trace), sch)
    return sch


_RULES: dict[str, Callable[[Candidate, Any, Device], Any]] = {
    "gemm": _gemm,
    "registers": _registers,
    "dsm": _dsm,
    "l2": _phases,
    "global": _phases,
    "trace": _trace,
}


def _tiles(kind: type, given: Mapping[str, Any], candidate: Candidate) -> Any:
    known = tuple(each.name for each in fields(kind))
    if unknown := given.keys() - set(known):
        raise _unknown(candidate, unknown, known)
    return kind(**given)


def _unknown(candidate: Candidate, unknown: set[str], known: tuple[str, ...]) -> Exception:
    return refuse(
        ScheduleRefused,
        "tiles",
        f"family {candidate.family} of {candidate.spec}",
        found=", ".join(sorted(unknown)),
        limit=", ".join(known),
        instead="name tile extents like these",
    )
