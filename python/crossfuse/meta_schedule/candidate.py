"""A kernel that may be built and measured, as a value that travels; and its schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from crossfuse.bench.problem import is_function
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.files import read_text, sha256
from crossfuse.hardware import Device, device
from crossfuse.planner.cascade.shape import shape_of_cascade
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.planner.families.registry import FAMILIES as CHAINS
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.tune.kernel_space import Space, cascade_space_of, space_of
from crossfuse.schema import Damaged, parse, typed
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec

_refused = Rule(WorkloadRefused, "candidate")

#: Family of recorded schedules, which candidates have besides those that the planner knows.
TRACE = "trace"
#: Where each family keeps the intermediate, and the rule that schedules it.
FAMILIES = {
    **{name: each.summary for name, each in CHAINS.items()},
    **{name: each.summary() for name, each in CASCADE_FAMILIES.items()},
    TRACE: "a recorded schedule, applied to the function of the spec",
    EAGER: "PyTorch eager (cuBLAS): nothing is built",
}
_KEYS = ("spec", "family", "tiles", "trace")
#: What a file may say of a candidate besides: how it is called, what is expected of it.
NOTES = ("name", "grid", "estimate")
_ID_DIGITS = 16


@dataclass(frozen=True)
class Candidate:
    """A workload and one way to compute it.

    Attributes
    ----------
    spec : str
        Text of the workload, see `crossfuse.workload.parse`; of family ``trace`` also the name of a
        function without a spec, see `crossfuse.bench.problem`.
    family : str
        A key of `FAMILIES`.
    tiles : Mapping[str, Any]
        Fields of `RegisterTiles` (``registers``), `ClusterTiles` (``dsm``), `TensorTiles`
        (``gemm``), `StreamTiles` (``stream``), `CascadeTiles` (``tiles``), `RowsTiles`
        (``rows``) or `RowsChainTiles` (``rows_chain``); for ``l2`` and ``global`` those of both
        phases, as ``first`` and ``second``. What is left out is chosen by the rule.
    trace : Sequence[Any]
        Family ``trace``: what `crossfuse.schedule.planned.trace_json` wrote, as JSON values.
    notes : Mapping[str, Any]
        Carried along by the keys of `NOTES`; no part of what is compared or built.

    Examples
    --------
    >>> each = Candidate.from_json({"spec": "gemm:M=64,K=64,N=128", "family": "gemm"}, "mine")
    >>> each.family
    'gemm'
    """

    spec: str
    family: str
    tiles: Mapping[str, Any] = field(default_factory=dict)
    trace: Sequence[Any] = ()
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def id(self) -> str:
        """Equal for equal candidates: the beginning of a hash of their JSON."""
        text = json.dumps(self._identity(), sort_keys=True)
        return sha256(text.encode())[:_ID_DIGITS]

    @property
    def summary(self) -> str:
        """Family and tiles in a few words, such as ``dsm rows=64 cluster=8 parts=6``."""
        return " ".join([self.family, *_words(self.tiles)])

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write; what is empty is left out."""
        return {**self._identity(), **self.notes}

    def _identity(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _KEYS}
        return {name: value for name, value in found.items() if value}

    @staticmethod
    def from_json(value: Any, where: str) -> Candidate:
        """Read what `to_json` or a person wrote.

        Parameters
        ----------
        value : Any
            A JSON value.
        where : str
            Its place, for messages.

        Returns
        -------
        Candidate
            Its spec resolved, so that packaged ids (``S3:M=128``) will do.

        Raises
        ------
        WorkloadRefused
            If it is no candidate, of an unknown family, or its spec is none.
        """
        from crossfuse.workload.cascades import resolve_any

        try:
            found = typed(_Written, value)
        except Damaged as error:
            raise _refused(where, error.found, error.limit, "name the fields like that") from None
        if found.family not in FAMILIES:
            limit = ", ".join(FAMILIES)
            raise _refused(where, f"family {found.family!r}", limit, "choose one of these")
        notes = {key: value[key] for key in NOTES if key in value}
        spec = found.spec if is_function(found.spec) else str(resolve_any(found.spec))
        made = Candidate(spec, found.family, found.tiles, found.trace, notes)
        _check(made, where)
        return made


@dataclass(frozen=True)
class _Written:
    """A candidate as a file has it: its own fields, and `NOTES`."""

    spec: str
    family: str
    tiles: Mapping[str, Any] = field(default_factory=dict)
    trace: Sequence[Any] = ()
    name: str = ""
    grid: Any = None
    estimate: float | None = None


def read_candidates(path: Path) -> tuple[Candidate, ...]:
    """Read a JSON list of candidates, or JSON lines of them, without repetitions.

    The first entry that is no candidate is named in the refusal.
    """
    try:
        text = read_text(path)
        values = parse(text) if text.lstrip().startswith("[") else _lines(text)
    except Damaged as error:
        limit = "a JSON list of candidates, or one candidate a line"
        raise _refused(str(path), str(error), limit, "write the file again") from error
    found = [
        Candidate.from_json(value, f"{path}, candidate {index}")
        for index, value in enumerate(values)
    ]
    return tuple({each.id: each for each in found}.values())


def _lines(text: str) -> list[Any]:
    return [parse(line) for line in text.splitlines() if line.strip()]


def _check(candidate: Candidate, where: str) -> None:
    """Refuse what is wrong without scheduling anything."""
    if is_function(candidate.spec) and candidate.family != TRACE:
        limit = "family trace for a function without a spec"
        raise _refused(where, f"family {candidate.family}", limit, "name a workload with a spec")
    _check_kind(candidate, where)
    if (candidate.family == TRACE) != bool(candidate.trace):
        limit = "a trace for family trace, and for no other"
        raise _refused(where, f"family {candidate.family}", limit, "write tiles for a family")


def _check_kind(candidate: Candidate, where: str) -> None:
    """Refuse families of chains for a cascade, and those of cascades for a chain."""
    from crossfuse.workload.cascades import names_one

    of_cascades = (*CASCADE_FAMILIES, EAGER)
    if names_one(candidate.spec):
        wrong, limit = candidate.family not in of_cascades, f"{', '.join(of_cascades)} of a cascade"
    else:
        wrong = candidate.family in CASCADE_FAMILIES
        limit = ", ".join(each for each in FAMILIES if each not in CASCADE_FAMILIES)
    if wrong:
        raise _refused(where, f"family {candidate.family}", limit, "choose one of these")


def _words(tiles: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in tiles.items():
        if isinstance(value, Mapping):
            found.append(f"{name}({', '.join(_words(value))})")
        elif value:
            found.append(f"{name}={value}")
    return found


# Schedules candidates.


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
    family = CHAINS[candidate.family]
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
    from crossfuse.schedule.planned import annotate_plan

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
    from crossfuse.schedule.planned import trace_json

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
