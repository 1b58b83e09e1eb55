"""Which kernel a source gets: the ways to schedule it, and the first of them that lowers."""

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
    """What a caller leaves to choose: the options of `crossfuse.compile` that narrow it.

    Attributes
    ----------
    rule, placement, cluster, plan, constant_weights, fewer_rows, database
        See `crossfuse.compile`.
    """

    rule: str = "auto"
    placement: str = "auto"
    cluster: int | None = None
    plan: Plan | CascadePlan | None = None
    constant_weights: bool | None = None
    fewer_rows: bool = False
    database: str | Path | None = None


@dataclass(frozen=True)
class Chosen:
    """A kernel, before it is built.

    Attributes
    ----------
    option : Option
        The way that was taken.
    schedule : Any
        The ``tvm.s_tir.Schedule``.
    lowered : Lowered
        Its CUDA.
    refused : tuple[str, ...]
        What rules that come first were refused for.
    """

    option: Option
    schedule: Any
    lowered: Lowered
    refused: tuple[str, ...] = ()

    @property
    def why(self) -> dict[str, Any]:
        """What the library's metadata say of the choice, see `Option.why`."""
        return {**self.option.why, **({"refused": [*self.refused]} if self.refused else {})}


def choose(
    source: Source,
    target: Device,
    wanted: Wanted = Wanted(),
    name: str = "main",
    timer: Timer | None = None,
) -> Chosen:
    """Schedule and lower a source in the best way that gives a correct kernel.

    Parameters
    ----------
    source : Source
        See `crossfuse.compiler.read_source`.
    target : Device
        What to compile for.
    wanted : Wanted
        What narrows the choice.
    name : str
        Of the function in the library.
    timer : Timer | None
        Times the first few kernels, of which the fastest is taken; None takes the first.

    Returns
    -------
    Chosen
        Schedule and code.

    Raises
    ------
    WorkloadRefused, ScheduleRefused, LoweringRefused, CascadeRefused, PlanRefused
        If there is no kernel of this kind, with the reason.
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
    """Ways to schedule a source, the best one first; see `choose`."""
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
    """The planner's choice; ordinary instructions where the Hopper pipeline has no kernel."""
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
    """A schedule whose kernels take fewer rows; the caller's own one stays as it is."""
    from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows

    schedule = make().copy()
    accept_fewer_rows(schedule)
    return schedule


def _reasons(refusals: Sequence[RefusedError]) -> tuple[str, ...]:
    """What was found by the refusals, each once."""
    return tuple(dict.fromkeys(str(each.refusal.found) for each in refusals))


def _none_fits(source: Source, refusals: list[RefusedError]) -> RefusedError:
    """The refusal itself, or of several the one that names them all."""
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
