"""The choice of a source's kernel: the options to schedule it, and the best of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.options import (
    PLACEMENTS,
    Option,
    cascade_options,
    is_cascade,
    recorded_options,
    tensor_options,
)
from crossfuse.compiler.source import Source
from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.plan import CascadePlan

if TYPE_CHECKING:
    from crossfuse.lower.extract import Lowered
    from crossfuse.measure.timer import Timer
    from crossfuse.planner.plan import Plan

# Checks of arguments of `compile` that do not go together, before anything is scheduled.


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
    plan: Plan | CascadePlan | None,
    cluster: int | None,
    cascade: bool = False,
) -> None:
    """Refuse a plan that would be ignored, or a cluster size beside a plan."""
    if plan is None:
        return
    if cascade or isinstance(plan, CascadePlan):
        _check_cascade_plan(source, plan, cascade)
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


def _check_cascade_plan(source: Source, plan: Plan | CascadePlan, cascade: bool) -> None:
    """Refuse a plan of anything but the cascade that is compiled."""
    if cascade and isinstance(plan, CascadePlan) and plan.shape.name == source.summary:
        return
    what = "a cascade" if cascade else "no cascade of reductions"
    of = f"a plan of {plan.shape.name}" if isinstance(plan, CascadePlan) else "a plan of a chain"
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


# Options to schedule a chain as one kernel of ordinary instructions, for any cluster size.

#: Tried in order where the caller leaves the cluster size open: portable sizes first.
_CLUSTER_SIZES = (8, 4, 16, 2, 7, 6, 5, 3, 1)


def thread_options(func: Any, cluster: int | None = None) -> list[Option]:
    """Options to schedule a canonical function by the rule for its number of products.

    There is one for each cluster size, or for the given one alone.
    """
    sizes = (cluster,) if cluster else _CLUSTER_SIZES
    return [Option(partial(_by_rule, func, each), why={"rule": "threads"}) for each in sizes]


def _by_rule(func: Any, cluster: int) -> Any:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.schedule.rules.ffn import schedule_ffn
    from crossfuse.schedule.rules.split_k import schedule_split_k

    single = read_chain(ir.Schedule(func)).second is None
    return (schedule_split_k if single else schedule_ffn)(func, cluster=cluster)


#: Ways of scheduling a canonical function.
RULES = ("auto", "tensor", "threads")


@dataclass(frozen=True)
class Wanted:
    """The options of `crossfuse.compile` that narrow its choice of a kernel, documented there."""

    rule: str = "auto"
    placement: str = "auto"
    cluster: int | None = None
    plan: Plan | CascadePlan | None = None
    constant_weights: bool | None = None
    fewer_rows: bool = False
    database: str | Path | None = None
    early: bool = False


@dataclass(frozen=True)
class Chosen:
    """A kernel that was scheduled and lowered, but not built yet."""

    option: Option
    #: The ``tvm.s_tir.Schedule``.
    schedule: Any
    lowered: Lowered
    #: Why rules of higher preference were refused.
    refused: tuple[str, ...] = ()

    @property
    def why(self) -> dict[str, Any]:
        """The library's metadata about the choice, see `Option.why`."""
        return {**self.option.why, **({"refused": [*self.refused]} if self.refused else {})}


def choose(
    source: Source,
    target: Device,
    wanted: Wanted = Wanted(),
    name: str = "main",
    timer: Timer | None = None,
) -> Chosen:
    """Schedule and lower a source by the best option that gives a correct kernel.

    With a timer, the first few kernels are timed and the fastest is taken; else the first is. If no
    option lowers, the refusal is the one that all gave, or a `ScheduleRefused` that names the
    reasons.
    """
    from crossfuse.lower.extract import lower

    refusals: list[tuple[Any, RefusedError]] = []
    options = options_of(source, target, wanted)
    if timer is not None:
        from crossfuse.compiler.measure import measured_option

        how = repr((wanted, source.constant_weights))
        options = [measured_option(source, options, target, timer, how)]
    # What is planned lowers, if anything of the Hopper pipeline does; the next are to be measured.
    options = [each for each in options if each.plan is None or each is options[0]]
    for option in options:
        rule = option.why.get("rule")
        try:
            schedule = option.make()
            lowered = lower(schedule, target, name=name, early=wanted.early)
        except (ScheduleRefused, LoweringRefused) as error:
            refusals.append((rule, error))
        else:
            of_others = [error for other, error in refusals if other != rule]
            return Chosen(option, schedule, lowered, _reasons(of_others))
    raise _none_fits(source, [error for _, error in refusals])


def options_of(source: Source, target: Device, wanted: Wanted = Wanted()) -> Sequence[Option]:
    """Options to schedule a source, the best one first; see `choose`."""
    check_known("rule", wanted.rule, RULES)
    check_known("placement", wanted.placement, PLACEMENTS)
    cascade = is_cascade(source)
    check_place(wanted.rule, wanted.placement, cascade)
    check_plan(source, wanted.rule, wanted.placement, wanted.plan, wanted.cluster, cascade)
    constant = wanted.constant_weights
    if constant is None:
        constant = source.constant_weights
    plan: Any = wanted.plan  # of what is compiled, as was checked
    if source.schedule is not None:
        options = [Option(lambda: source.schedule)]
    elif wanted.database is not None:
        options = recorded_options(source, wanted.database, target, constant)
    elif cascade:
        options = cascade_options(source, target, plan, constant, wanted.placement)
    else:
        options = _of_chain(source, target, wanted, plan, constant)
    if wanted.fewer_rows:
        check_no_model(source)
        options = [replace(each, make=partial(_with_fewer_rows, each.make)) for each in options]
    return options


def _of_chain(
    source: Source, target: Device, wanted: Wanted, plan: Plan | None, constant: bool
) -> list[Option]:
    """The planner's options, then ordinary instructions for what the Hopper pipeline cannot do."""
    options: list[Option] = []
    if wanted.rule != "threads":
        # Of padded operands a call has all rows; a plan is of them, or of something else.
        padded = None if wanted.fewer_rows and plan is None else source.padded
        options += tensor_options(
            padded or source,
            wanted.placement,
            target,
            plan=plan,
            cluster=wanted.cluster or 0,
            constant=constant and padded is None,
            pipelined=wanted.rule == "tensor" or wanted.fewer_rows,
        )
    if wanted.rule != "tensor" and wanted.placement == "auto" and plan is None:
        options += thread_options(source.func, wanted.cluster)
    return options


def _with_fewer_rows(make: Callable[[], Any]) -> Any:
    """A schedule whose kernels accept fewer rows; the caller's own schedule is not changed."""
    from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows

    schedule = make().copy()
    accept_fewer_rows(schedule)
    return schedule


def _reasons(refusals: Sequence[RefusedError]) -> tuple[str, ...]:
    """Distinct findings of the refusals."""
    return tuple(dict.fromkeys(str(each.refusal.found) for each in refusals))


def _none_fits(source: Source, refusals: list[RefusedError]) -> RefusedError:
    """The refusal itself if all found the same, else one that names each rule that was broken."""
    if len(_reasons(refusals)) == 1:
        return refusals[0]
    return refuse(
        ScheduleRefused,
        "compile",
        source.summary,
        found=_of_each_rule(refusals),
        limit="a cluster size of 1 to 16 for which a rule has a schedule that fits",
        instead="give rule and cluster, or write the schedule with the primitives",
    )


#: Characters of findings that fit on a screen.
_SCREEN = 400


def _of_each_rule(refusals: Sequence[RefusedError]) -> str:
    """The shortest finding of each broken rule, these in their order by length.

    Where they are too long for a screen the rules alone are named.
    """
    shortest: dict[str, str] = {}
    for refusal in sorted((each.refusal for each in refusals), key=lambda each: len(each.found)):
        shortest.setdefault(refusal.rule, refusal.found)
    shown, left = "", dict(shortest)
    for rule, found in shortest.items():
        more = f"{shown}; {rule}: {found}" if shown else f"{rule}: {found}"
        if shown and len(more) > _SCREEN:
            break
        shown, _ = more, left.pop(rule)
    return f"{shown}; and {', '.join(left)}" if left else shown
