"""Planned and scheduled functions of the chains in a model, each distinct function once."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Var
from tvm_ffi import structural_equal, structural_hash

from crossfuse import _tvm as ir
from crossfuse.cache import shelf
from crossfuse.cache.keys import content_key
from crossfuse.cache.shelf import answered
from crossfuse.errors import PlanRefused, RefusedError, contained
from crossfuse.hardware import Device
from crossfuse.lower.extract import buffer_specs, lower
from crossfuse.markers import unpadded_shapes
from crossfuse.measure.choice import FEW
from crossfuse.measure.way import Given
from crossfuse.planner.choice import noted
from crossfuse.planner.cost.rates import rates_of
from crossfuse.relax.calls import REST, marked, with_plan
from crossfuse.relax.chains.calls import FunctionCall, call_of, calling, picking, private, value_of
from crossfuse.relax.chains.forms import Chains, Form
from crossfuse.relax.chains.groups import (
    Group,
    check_kernel,
    check_known,
    check_used_inside,
    is_left_operand,
)
from crossfuse.relax.chains.planned import Bins, PlannedChain, PlannedRows, plan_rows
from crossfuse.relax.choice import Candidate
from crossfuse.relax.graph import Graph
from crossfuse.relax.measured import Contestant, Measuring, measured_kernels
from crossfuse.relax.outcome import BinOutcome
from crossfuse.relax.outline import Outlined
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import (
    extents_of,
    rows_of,
    symbols_of,
    with_extents,
)
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schema import read

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan

# Plans and kernels are made once for all structurally equal functions.


class Equal:
    """Values by function; functions that differ in names alone share one."""

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


T = TypeVar("T")

#: What refusals of faults in planning name.
_WHERE = ("fuse-chains", "a chain of products")


class ChainKernels:
    """Plans, schedules and collects the kernels of a module's chains.

    `module` is `mod` with the kernels. `constant_weights` is that of
    `crossfuse.schedule.planned.schedule_planned`, `named` that of `Graph.subgraph`. `bins` are the
    most rows of the kernels of symbolic rows, which are refused without any. With `measuring`
    kernels are timed and the fastest is taken; without, estimates choose. `weights` are variables
    with the same value in each call, as constants have: kernels that need longer rows of them get
    padded copies that are made once, not in each call. Chains begin and end with variables in
    `known`; None allows all. `forms` are the kinds of groups that are sought.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        target: Device,
        constant_weights: bool,
        named: bool = True,
        bins: Sequence[int] = (),
        measuring: Measuring | None = None,
        weights: Collection[Any] = (),
        known: Container[Any] | None = None,
        forms: Sequence[Form] = (Chains(),),
    ) -> None:
        self._builder = relax.BlockBuilder(mod)
        self.target = target
        self._constant = constant_weights
        self._named = named
        self._bins = tuple(bins)
        self._measuring = measuring
        self._weights = frozenset(weights)
        self._known = known
        self._forms = forms
        self._plans = Equal()
        self._names = Equal()
        self._rows_images = Equal()
        self._rows_names = Equal()
        self._functions = Equal()

    @property
    def module(self) -> tvm.IRModule:
        """The module with the kernels that were made."""
        return self._builder.get()

    def candidates(self, graph: Graph) -> Iterator[Candidate]:
        """See `crossfuse.relax.choice.Kernels`."""
        for form, group in self._groups(graph):
            parts = group.products
            names = tuple(str(each.name) for each in parts)
            try:
                with contained(PlanRefused, *_WHERE):
                    planned = self.planned(graph, group, form)
            except RefusedError as error:
                yield Candidate(names, None, str(error))
            else:
                behind = self._behind(graph, planned)
                yield Candidate(names, planned, parts=parts, behind=behind)

    def _behind(self, graph: Graph, chain: PlannedChain | PlannedRows) -> float:
        """See `Candidate.behind`; what was measured has all of a group."""
        if chain.words or not is_left_operand(graph, chain.output):
            return 0.0
        return rates_of(self.target).fitted.eager_kernel

    def _groups(self, graph: Graph) -> Iterator[tuple[Form, Group]]:
        for form in self._forms:
            for group in form.find(graph):
                yield form, group

    def planned(
        self, graph: Graph, group: Group, form: Form | None = None
    ) -> PlannedChain | PlannedRows:
        """Plan a group, with as much as possible of what follows it as its epilogue.

        Symbolic rows are planned in each bin. Refused is a group that is no chain, or of which
        other code reads intermediates; the reason is that of the longest form.
        """
        refusals: list[RefusedError] = []
        for output, after in group.outputs():
            inner = [*group.before, *after]
            try:
                check_used_inside(graph, inner, output, group)
                module, given = graph.subgraph(inner, output, self._named)
                check_known([output, *given], self._known)
                return self._planned(graph, output, given, module, form or self._forms[0])
            except RefusedError as error:
                refusals.append(error)
        raise refusals[0]

    def _planned(
        self, graph: Graph, output: Var, given: tuple[Var, ...], module: Any, form: Form
    ) -> PlannedChain | PlannedRows:
        """Plan a group that is a module of its own."""

        def plan(static: Any, sizes: Mapping[Var, int]) -> PlannedChain:
            outlined = form.outlined(static)
            if not sizes:  # of padded arguments a call has all rows
                outlined = outlined.padded(self._stored(outlined, given))
            plans = self._ranked(outlined.func, form)
            return self._timed(PlannedChain(plans, None, output, given, outlined, form), sizes)

        if not self._bins or not symbols_of(module["main"]):
            return plan(module, {})
        form.check_rows(module["main"], rows_of(output))
        bins = Bins(self._bins, graph.attributes)
        return plan_rows(output, given, module["main"], bins, plan)

    def _stored(self, outlined: Outlined, given: Sequence[Var]) -> frozenset[str]:
        """Arguments of a chain that are the same in each call: constants and weights."""
        return frozenset(
            each.name
            for each in outlined.arguments
            if each.value is not None or given[each.position] in self._weights
        )

    def kernel(self, chain: PlannedChain | PlannedRows, always: bool = False) -> Replacement:
        """See `crossfuse.relax.choice.Kernels`.

        Of symbolic rows, `always` schedules bins too in which the kernel is estimated to be slower.
        It refuses if no plan has a kernel; of symbolic rows with the reason of the first bin.
        """
        with contained(PlanRefused, *_WHERE):
            if isinstance(chain, PlannedRows):
                return self._picked(chain, always)
            func = chain.outlined.func
            name = self._names.find(func, lambda: self._added(chain))
            return call_of(Replacement, name, chain, chain.given, chain.output)

    def _picked(self, chain: PlannedRows, always: bool) -> Replacement:
        """The call of what picks the kernel by the number of rows."""
        function, extents = with_extents(chain.function)
        kernels: dict[int, GlobalVar] = {}
        outcomes: list[BinOutcome] = []
        refusals: list[RefusedError] = []
        for each in chain.bins:
            outcome = each.outcome(always)
            if each.chain is not None and not outcome.text:
                try:
                    kernels[each.rows] = self._of_bin(each.chain, function.params)
                    outcome = each.outcome(always, name=str(kernels[each.rows].name_hint))
                except RefusedError as error:
                    refusals.append(error)
                    outcome = each.outcome(always, text=str(error))
            outcomes.append(outcome)
        if not kernels:
            raise refusals[0]
        return self.picked(chain, function, extents, kernels, tuple(outcomes))

    def picked(
        self,
        chain: PlannedRows,
        function: Any,
        extents: tuple[Any, ...],
        kernels: Mapping[int, GlobalVar],
        outcomes: tuple[BinOutcome, ...],
    ) -> Replacement:
        """The call of a function that picks one of some bins' kernels.

        `function` and `extents` are those of `with_extents`.
        """
        unfused = private(function, function.body).with_attr(REST, True)
        rest = self._function(unfused, f"{chain.name}_rest")
        callers: dict[int, GlobalVar] = {}
        for each in chain.bins:
            callers[each.rows] = rest
            if each.chain is not None and each.rows in kernels:
                kernel = kernels[each.rows]
                caller = calling(function, kernel, each.chain, chain.rows)
                callers[each.rows] = self._function(caller, f"{kernel.name_hint}_call")
        name = self._function(picking(function, chain.rows, callers, rest), f"{chain.name}_rows")
        shapes = (*map(extents_of, chain.given), *extents)
        made = ((chain.output,), (chain.output.ty,))
        return FunctionCall(name, (*chain.given, *extents), shapes, *made, bins=outcomes)

    def _of_bin(self, chain: PlannedChain, params: Sequence[Any]) -> GlobalVar:
        """A bin's kernel, of a group with these parameters."""
        func = chain.outlined.func
        image, buffers = self._rows_images.find(func, lambda: self._bin_image(chain))
        check_kernel(buffers, [value_of(each, params) for each in chain.outlined.arguments])
        kernel: GlobalVar = self._rows_names.find(func, lambda: self._added_bin(chain, image))
        return kernel

    def _function(self, function: Any, name: str) -> GlobalVar:
        """Add a function to the module, equal ones once."""
        found: GlobalVar = self._functions.find(
            function, lambda: self._builder.add_func(function, name)
        )
        return found

    def _ranked(self, func: Any, form: Form) -> tuple[Plan | CascadePlan, ...]:
        def read_plans(text: str) -> tuple[Plan | CascadePlan, ...]:
            return tuple(map(form.read_plan, read(tuple[str, ...], text)))

        def rank() -> tuple[Plan | CascadePlan, ...]:
            make = partial(_ranked_texts, form, func, self.target)
            return self._answer("plan", func, make, read_plans, form.name)

        plans: tuple[Plan | CascadePlan, ...] = self._plans.find(func, rank)
        return plans

    def _timed(self, chain: PlannedChain, sizes: Mapping[Var, int]) -> PlannedChain:
        """A chain with its measured times, if kernels are measured."""
        if self._measuring is None:
            return chain
        given = [
            Given(each.shape, each.dtype, cold=at > 0)
            for at, each in enumerate(chain.outlined.arguments)
        ]
        first = chain.outlined.arguments[0].position
        cold = [at != first for at in range(len(chain.given))]
        plans = [
            Contestant(each, partial(self._of_plan, chain, each, bool(sizes)))
            for each in chain.kernels
        ]
        func = tvm.ir.save_json(chain.outlined.func)
        found = measured_kernels(
            self._measuring.timer,
            self.target,
            [func, str(self._constant), str(bool(sizes))],
            _label(chain.outlined.func, self.target),
            plans,
            given,
            self._measuring.separate(chain.output, chain.given, cold, sizes),
        )
        return replace(chain, measured=found)

    def _added(self, chain: PlannedChain) -> GlobalVar:
        kernel = self._kernel(chain, False)
        # The variable has the type of what callers pass, where the kernel copies that.
        name = self._builder.add_func(_declared(kernel), chain.name)
        self._builder.update_func(name, kernel)
        return name

    def _bin_image(self, chain: PlannedChain) -> tuple[Any, tuple[BufferSpec, ...]]:
        image = self._kernel(chain, True)
        return image, buffer_specs(image)

    def _added_bin(self, chain: PlannedChain, image: Any) -> GlobalVar:
        name = self._builder.add_func(image, f"{chain.name}_m{chain.outlined.M}")
        # Called by its name, which no pass that looks for dead code follows.
        self._builder.update_func(name, image.with_attr("global_symbol", name.name_hint))
        return name

    def _kernel(self, chain: PlannedChain, fewer_rows: bool) -> Any:
        """The scheduled function of a chain."""
        best = None if chain.measured is None else chain.ours.to_json()
        options = (str(self._constant), str(fewer_rows), str(best))
        make = partial(self._scheduled, chain, fewer_rows)
        func = chain.outlined.func
        return marked(self._answer("schedule", func, make, read_function, *options))

    def _answer(
        self,
        kind: str,
        func: Any,
        make: Callable[[], str],
        use: Callable[[str], T],
        *options: str,
    ) -> T:
        """What `use` reads of the text that `make` writes for a function, which is cached."""
        key = content_key(self.target, kind, str(FEW), *options, tvm.ir.save_json(func))
        return answered(shelf(kind), key, _label(func, self.target), make, use)

    def _scheduled(self, chain: PlannedChain, fewer_rows: bool) -> str:
        """The scheduled function of the best plan in TVM's JSON."""
        return str(tvm.ir.save_json(self._of_plan(chain, chain.ours, fewer_rows)))

    def _of_plan(self, chain: PlannedChain, plan: Any, fewer_rows: bool) -> Any:
        """The function of a chain, scheduled by a plan; refuses one that does not lower."""
        schedule = chain.form.scheduled(chain.outlined.func, plan, self._constant)
        if fewer_rows:
            accept_fewer_rows(schedule)
        lower(schedule, self.target)
        (image,) = schedule.mod.functions.values()
        return with_plan(image, noted(plan, chain.eager))


def _declared(kernel: Any) -> Any:
    """A function without a body, of the arguments of a kernel as callers pass them."""
    if not unpadded_shapes(kernel):
        return kernel
    params = [
        ir.tirx.decl_buffer(list(each.shape), each.dtype, each.name)
        for each in buffer_specs(kernel)
    ]
    return ir.PrimFunc(params, ir.tirx.Evaluate(0), kernel.ret_type, kernel.attrs)


def read_function(text: str) -> Any:
    """A TIR function from TVM's JSON."""
    return ir.load_json(text, ir.PrimFunc)


def _ranked_texts(form: Form, func: Any, target: Device) -> str:
    """Plans of a function in JSON."""
    return json.dumps([each.to_json() for each in form.ranked(func, target)])


def _label(func: Any, target: Device) -> str:
    """Parameters of a function, as the label of its cache entry."""
    given = (f"{each.name}{list(map(int, each.ty.shape))}" for each in func.params)
    return f"{' '.join(given)} {func.params[0].ty.dtype} for {target.name}"
