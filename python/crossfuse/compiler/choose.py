"""The choice of a source's kernel: the options to schedule it, and the first that lowers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.arguments import check_known, check_no_model, check_place, check_plan
from crossfuse.compiler.cascades import cascade_options, is_cascade
from crossfuse.compiler.option import Option
from crossfuse.compiler.placement import PLACEMENTS, tensor_options
from crossfuse.compiler.recorded import recorded_options
from crossfuse.compiler.source import Source
from crossfuse.compiler.threads import thread_options
from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused, refuse
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.lower.extract import Lowered
    from crossfuse.measure.timer import Timer
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan

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
        from crossfuse.compiler.measured import measured_option

        how = repr((wanted, source.constant_weights))
        options = [measured_option(source, options, target, timer, how)]
    for option in options:
        rule = option.why.get("rule")
        try:
            schedule = option.make()
            lowered = lower(schedule, target, name=name)
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
    """The refusal itself if all found the same, else one that names them all."""
    reasons = _reasons(refusals)
    if len(reasons) == 1:
        return refusals[0]
    return refuse(
        ScheduleRefused,
        "compile",
        source.summary,
        found="; ".join(reasons[:3]),
        limit="a cluster size of 1 to 16 for which a rule has a schedule that fits",
        instead="give rule and cluster, or write the schedule with the primitives",
    )
