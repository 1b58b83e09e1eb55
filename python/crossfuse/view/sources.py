"""Reads what can be viewed: workloads, plans, candidates and traces, modules, schedules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse.errors import PlanRefused, RefusedError, WorkloadRefused, refuse
from crossfuse.files import read_text
from crossfuse.hardware import Device
from crossfuse.planner.families import EAGER
from crossfuse.schema import Damaged, parse


@dataclass(frozen=True)
class Viewed:
    """What a page shows."""

    title: str
    #: The ``tvm.s_tir.Schedule``; None where nothing of ours runs, or a plan does not say of which
    #: function it is.
    schedule: Any = None
    #: The explanation of its plan, with ``text`` and ``svg``; None without a plan.
    reasons: Any = None
    #: For a workload: what was planned, or why nothing was.
    choice: str = ""


def read_viewed(source: Any, target: Device, workload: str = "") -> Viewed:
    """Read what is to be shown, for planning on a target.

    A source is a schedule; a packaged id or the text of a spec; or a file: a plan
    (``Plan.to_json``, or what ``crossfuse explain --json`` printed), a candidate or the first of a
    list (also one that holds a trace), or a scheduled module, as TVM's JSON or as TVMScript
    (``.py``). For the plan of a chain `workload` is its spec. Anything else is refused, and so is a
    source without a plan or a schedule.
    """
    if not isinstance(source, (str, Path)):
        return Viewed("a schedule", source)
    path = Path(source)
    if path.suffix in (".json", ".jsonl", ".py"):
        return _from_file(path, target, workload)
    return _from_workload(str(source), target)


def _from_workload(text: str, target: Device) -> Viewed:
    """The kernel that `crossfuse.compile` builds, and why that one."""
    from crossfuse.compiler import read_source
    from crossfuse.compiler.compiled import choose
    from crossfuse.compiler.report import choice_text

    chosen = choose(read_source(text), target)
    plan = chosen.option.plan
    reasons = plan.explain(target) if plan is not None else None
    return Viewed(text, chosen.schedule, reasons, choice_text(chosen.why))


def _from_file(path: Path, target: Device, workload: str) -> Viewed:
    try:
        text = read_text(path)
    except Damaged as error:
        raise _refused(path, str(error)) from None
    if path.suffix == ".py":
        return Viewed(path.name, _module(_script(path, text)))
    value = _value(path, text)
    if isinstance(value, dict) and "root_index" in value:
        from crossfuse import _tvm as ir

        try:
            return Viewed(path.name, _module(ir.load_json(text, (ir.IRModule, ir.PrimFunc))))
        except Damaged as error:
            raise _refused(path, str(error)) from None
    if isinstance(value, dict) and ("plan" in value or "version" in value):
        return _from_plan(path, value.get("plan", value), workload)
    return _from_candidate(path, target)


def _value(path: Path, text: str) -> Any:
    try:
        # TVM writes infinities.
        return parse(text, finite=False) if path.suffix == ".json" else None
    except Damaged as error:
        raise _refused(path, str(error)) from None


def _script(path: Path, text: str) -> Any:
    from crossfuse import _tvm as ir

    try:
        return ir.tvm.script.from_source(text)
    except Exception as error:  # TVM's parser raises whatever it comes across.
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise _refused(path, last[0]) from error


def _module(value: Any) -> Any:
    """A scheduled module as a schedule without a trace."""
    from crossfuse import _tvm as ir
    from crossfuse.lower.extract import only_function

    return ir.Schedule(only_function(value))


def _from_plan(path: Path, value: Any, workload: str) -> Viewed:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan

    kind = Plan if isinstance(value, dict) and "chain" in value else CascadePlan
    plan = kind.from_json(json.dumps(value))
    spec = workload or getattr(getattr(plan, "shape", None), "name", "")
    return Viewed(spec or path.name, _schedule_of(spec, plan), plan.explain())


def _schedule_of(spec: str, plan: Any) -> Any:
    """The schedule of a plan; None for a plan that does not fuse, or without a workload."""
    if plan.family == EAGER or not spec:
        return None
    from crossfuse.planner.plan import is_cascade

    if is_cascade(spec):
        from crossfuse.meta_schedule.scheduled import function_of
        from crossfuse.schedule.planned import schedule_cascade_of
        from crossfuse.workload import cascades

        func = function_of(str(cascades.resolve_any(spec)))
        return schedule_cascade_of(func, plan.family, plan.tiles, constant_weights=True)
    from crossfuse.schedule.planned import schedule_workload

    return schedule_workload(spec, plan, constant_weights=True)


def _from_candidate(path: Path, target: Device) -> Viewed:
    from crossfuse.meta_schedule.candidate import read_candidates
    from crossfuse.meta_schedule.scheduled import schedule_candidate

    found = read_candidates(path)
    if not found:
        raise _refused(path, "no candidate")
    candidate = found[0]
    if candidate.family == EAGER:
        raise refuse(
            PlanRefused,
            "view",
            str(path),
            found="a candidate that is not ours, but PyTorch's",
            limit="a kernel of ours",
            instead="name a candidate of another family",
        )
    return Viewed(f"{candidate.spec}, {candidate.summary}", schedule_candidate(candidate, target))


def _refused(path: Path, found: str) -> RefusedError:
    return refuse(
        WorkloadRefused,
        "view",
        str(path),
        found=found,
        limit="a plan, a candidate with its trace or tiles, or a scheduled module, as JSON, or "
        "TVMScript",
        instead="write it by Plan.to_json, crossfuse explain --json or tvm.ir.save_json, or name a "
        "workload such as S3",
    )
