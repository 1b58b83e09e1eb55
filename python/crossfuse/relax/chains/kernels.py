"""Planned and scheduled functions of the chains in a model, equal ones once."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Var
from tvm_ffi import structural_equal, structural_hash

from crossfuse.cache import shelf
from crossfuse.cache.answers import answered
from crossfuse.cache.keys import content_key
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.lower.extract import lower
from crossfuse.planner.families import EAGER
from crossfuse.planner.noted import noted
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.replace import Replacement
from crossfuse.relax.dataflow import Dataflow, subgraph
from crossfuse.relax.kernel_mark import marked, with_plan
from crossfuse.relax.operators import refused
from crossfuse.relax.outline import Argument, Outlined, outline
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.planned import rank_function, schedule_planned

if TYPE_CHECKING:
    from crossfuse.planner.choice import Runner
    from crossfuse.planner.plan import Plan

#: Plans of a family that are tried, in case one cannot be scheduled.
_TRIED = 3


@dataclass(frozen=True)
class PlannedChain:
    """A group that is a chain, with its plans.

    Attributes
    ----------
    group : Group
        Its products and what lies between them.
    output : Var
        The result.
    given : tuple[Var, ...]
        What it reads: the parameters of the function that was outlined.
    outlined : Outlined
        The chain as one function.
    plans : tuple[Plan, ...]
        The fastest first.
    """

    group: Group
    output: Var
    given: tuple[Var, ...]
    outlined: Outlined
    plans: tuple[Plan, ...]

    @property
    def ours(self) -> Plan:
        """The best plan of a kernel of ours."""
        return next(each for each in self.plans if each.family != EAGER)

    @property
    def eager(self) -> float:
        """Estimated microseconds of not fusing."""
        every: list[Plan | Runner] = [*self.plans, *self.plans[0].runners]
        return next(each.microseconds for each in every if each.family == EAGER)

    @property
    def gain(self) -> float:
        """Estimated microseconds that fusing saves."""
        return self.eager - self.ours.microseconds


class ChainKernels:
    """Kernels of a module's chains.

    Parameters
    ----------
    mod : tvm.IRModule
        Gets the functions; `module` is it with them.
    target : Device
        What to plan for.
    constant_weights : bool
        See `crossfuse.schedule.planned.schedule_planned`.
    fewer_rows : bool
        Whether a call may have fewer rows, see `crossfuse.schedule.accept_fewer_rows`.
    named : bool
        See `crossfuse.relax.dataflow.subgraph`.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        target: Device,
        constant_weights: bool,
        fewer_rows: bool = False,
        named: bool = True,
    ) -> None:
        self._builder = relax.BlockBuilder(mod)
        self._target = target
        self._constant = constant_weights
        self._fewer_rows = fewer_rows
        self._named = named
        self._plans = _Equal()
        self._names = _Equal()

    @property
    def module(self) -> tvm.IRModule:
        """The module with the kernels that were made."""
        return self._builder.get()

    def planned(
        self, dataflow: Dataflow, group: Group, known: Container[Any] | None = None
    ) -> PlannedChain:
        """Plan a group, with as much as possible of what follows it.

        Parameters
        ----------
        dataflow : Dataflow
            Where it is.
        group : Group
            The group.
        known : Container[Var] | None
            Variables that it may begin and end with; None allows all.

        Returns
        -------
        PlannedChain
            The chain.

        Raises
        ------
        WorkloadRefused, PlanRefused
            If it is no chain, or values of it are needed elsewhere; of the longest form.
        """
        refusals: list[RefusedError] = []
        for output, after in group.outputs():
            inner = [*group.before, *after]
            try:
                _check_used_inside(dataflow, inner, output, group)
                module, given = subgraph(dataflow, inner, output, self._named)
                _check_known([output, *given], known)
                outlined = outline(module)
                plans = self._ranked(outlined.func)
                return PlannedChain(group, output, tuple(given), outlined, plans)
            except RefusedError as error:
                refusals.append(error)
        raise refusals[0]

    def kernel(self, chain: PlannedChain) -> Replacement:
        """Schedule a chain; the call of it.

        Raises
        ------
        ScheduleRefused, LoweringRefused
            If no plan has a kernel.
        """
        outlined = chain.outlined
        given = tuple(_value(each, chain.given) for each in outlined.arguments)
        shapes = tuple(each.shape for each in outlined.arguments)
        output = (outlined.M, outlined.L)
        name = self._names.find(outlined.func, lambda: self._added(chain))
        return Replacement(name, given, shapes, output, outlined.output_dtype)

    def _ranked(self, func: Any) -> tuple[Plan, ...]:
        def rank() -> tuple[Plan, ...]:
            from crossfuse.planner.plan import Plan

            text = self._answer("plan", func, lambda: _texts(func, self._target))
            return tuple(map(Plan.from_json, json.loads(text)))

        plans: tuple[Plan, ...] = self._plans.find(func, rank)
        return plans

    def _added(self, chain: PlannedChain) -> GlobalVar:
        func = chain.outlined.func
        options = (str(self._constant), str(self._fewer_rows))
        text = self._answer("schedule", func, lambda: self._scheduled(chain), *options)
        image = tvm.ir.load_json(text)
        kind = "gated_ffn" if chain.outlined.gated else "gemm_chain"
        return self._builder.add_func(marked(image), f"crossfuse_{kind}")

    def _answer(self, kind: str, func: Any, make: Callable[[], str], *options: str) -> str:
        """What is made of a function, from the cache if it is known."""
        key = content_key(self._target, kind, str(_TRIED), *options, tvm.ir.save_json(func))
        return answered(shelf(kind), key, _label(func, self._target), make)

    def _scheduled(self, chain: PlannedChain) -> str:
        """The first plan that has a kernel, as a scheduled function in TVM's JSON."""
        refusals: list[RefusedError] = []
        for plan in (each for each in chain.plans if each.family != EAGER):
            try:
                schedule = schedule_planned(
                    chain.outlined.func, plan, constant_weights=self._constant
                )
                if self._fewer_rows:
                    accept_fewer_rows(schedule)
                lower(schedule, self._target)
                (image,) = schedule.mod.functions.values()
                return str(tvm.ir.save_json(with_plan(image, noted(plan, chain.eager))))
            except RefusedError as error:
                refusals.append(error)
        raise refusals[0]


class _Equal:
    """Values by function; functions that differ in names alone have one value."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Any, Any]]] = {}

    def find(self, func: Any, make: Callable[[], Any]) -> Any:
        """The value of a function, made if it is new."""
        alike = self._known.setdefault(structural_hash(func), [])
        for other, value in alike:
            if structural_equal(func, other):
                return value
        alike.append((func, make()))
        return alike[-1][1]


def _texts(func: Any, target: Device) -> str:
    """Plans of a function in JSON."""
    return json.dumps([each.to_json() for each in rank_function(func, target, keep=_TRIED)])


def _label(func: Any, target: Device) -> str:
    """Parameters of a function, for people."""
    given = (f"{each.name}{list(map(int, each.ty.shape))}" for each in func.params)
    return f"{' '.join(given)} {func.params[0].ty.dtype} for {target.name}"


def _check_used_inside(dataflow: Dataflow, inner: list[Var], output: Var, group: Group) -> None:
    """Refuse a group of which anything but the result, or a weight's view, is read elsewhere."""
    for value in inner:
        for user in dataflow.users.get(value, []):
            if value.same_as(output) or value in group.views or user in inner:
                continue
            where = f"{dataflow.operator(value)} ({value.name})"
            what = "the model's results"
            if user is not None and not isinstance(dataflow.values[user], relax.Tuple):
                what = dataflow.operator(user) or "a call of another function"
            raise refused(
                where,
                f"an intermediate that {what} reads too",
                "one that nothing else reads",
                "leave the model unfused, or keep that use out of it",
            )


def _check_known(values: list[Var], known: Container[Any] | None) -> None:
    """Refuse a group that begins or ends inside of what its caller takes for one operator."""
    for value in values:
        if known is not None and value not in known:
            raise refused(
                str(value.name),
                "a part of an operator",
                "values that operators of the model make",
                "decompose the operator before",
            )


def _value(argument: Argument, given: tuple[Var, ...]) -> Any:
    """The value of a model that is an input of a chain."""
    if argument.value is not None:
        return relax.const(argument.value, argument.dtype)
    return given[argument.position]
