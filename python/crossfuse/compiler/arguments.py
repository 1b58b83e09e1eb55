"""Checks of arguments of `compile` that do not go together, before anything is scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.compiler.source import Source
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.planner.cascade.choice import CascadeChoice

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan


def check_known(what: str, found: str, known: tuple[str, ...]) -> None:
    """Refuse a name that is not among an argument's known names."""
    if found not in known:
        raise refuse(
            ScheduleRefused,
            "compile",
            what,
            found=repr(found),
            limit=", ".join(map(repr, known)),
            instead=f"name one of these {what}s, or pass a schedule",
        )


def check_place(rule: str, placement: str, cascade: bool) -> None:
    """Refuse a placement of the intermediate for kernels of ordinary instructions."""
    if rule == "threads" and placement != "auto" and not cascade:
        raise refuse(
            ScheduleRefused,
            "compile",
            "placement",
            found=f"{placement!r} with rule='threads'",
            limit="'auto': kernels of this rule keep an intermediate in DSM",
            instead="leave the rule out, or the placement",
        )


def check_plan(
    source: Source,
    rule: str,
    placement: str,
    plan: Plan | CascadeChoice | None,
    cluster: int | None,
    cascade: bool = False,
) -> None:
    """Refuse a plan that would be ignored, or a cluster size beside a plan."""
    if plan is None:
        return
    if cascade or isinstance(plan, CascadeChoice):
        _check_cascade(source, plan, cascade)
        return
    known = rule != "threads" and placement == "auto" and source.func is not None
    if known and not cluster:
        return
    found = f"a plan with rule={rule!r} and placement={placement!r}"
    if known:
        found = f"a plan, which has clusters, and cluster={cluster}"
    raise refuse(
        ScheduleRefused,
        "compile",
        "plan",
        found="a plan and a schedule" if source.schedule is not None else found,
        limit="a plan with rule='auto' or 'tensor' and placement='auto', of a source without a "
        "schedule, and no cluster",
        instead="pass these, or leave the plan out",
    )


def _check_cascade(source: Source, plan: Plan | CascadeChoice, cascade: bool) -> None:
    """Refuse a plan of anything but the cascade that is compiled."""
    if cascade and isinstance(plan, CascadeChoice) and plan.shape.name == source.summary:
        return
    what = "a cascade" if cascade else "no cascade of reductions"
    of = f"a plan of {plan.shape.name}" if isinstance(plan, CascadeChoice) else "a plan of a chain"
    raise refuse(
        ScheduleRefused,
        "compile",
        "plan",
        found=f"{of} for {source.summary}, {what}",
        limit="a plan of what is compiled",
        instead="plan this workload, or leave the plan out",
    )


def check_no_model(read: Source) -> None:
    """Refuse a model, whose inputs and output are reshaped to the shapes it was compiled with."""
    if read.outlined is not None:
        raise refuse(
            ScheduleRefused,
            "compile",
            "fewer_rows",
            found=read.summary,
            limit="a spec, a function or a schedule: a model has the shapes of its example inputs",
            instead="compile the model's chain as a spec",
        )
