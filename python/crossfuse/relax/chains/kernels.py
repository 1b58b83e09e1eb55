"""Planned and scheduled functions of the chains in a model, each distinct function once."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse import _tvm as ir
from crossfuse.cache import answered, content_key, shelf
from crossfuse.errors import PlanRefused, RefusedError, contained
from crossfuse.hardware import Device
from crossfuse.lower.extract import buffer_specs, lower
from crossfuse.markers import unpadded_shapes
from crossfuse.measure.choice import FEW
from crossfuse.measure.job import Given
from crossfuse.planner.choice import noted
from crossfuse.planner.cost.rates import rates_of
from crossfuse.relax.calls import REST, Equal, marked, with_plan
from crossfuse.relax.chains.groups import (
    Group,
    check_kernel,
    check_known,
    check_used_inside,
    is_left_operand,
    last_products,
    with_own_operators,
    with_whole_operators,
)
from crossfuse.relax.chains.kinds import Chains, GroupKind
from crossfuse.relax.chains.planned import (
    FunctionCall,
    PlannedChain,
    PlannedRows,
    calling,
    picking,
    plan_rows,
    private,
    value_of,
)
from crossfuse.relax.choice import Candidate, Measuring, measured_kernels
from crossfuse.relax.graph import Graph
from crossfuse.relax.outcome import BinOutcome
from crossfuse.relax.outline import Outlined
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import extents_of, most_rows, rows_of, symbols_of, with_extents
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schema import read

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan

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
    `known`; None allows all. `kinds` are those of groups that are sought.
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
        kinds: Sequence[GroupKind] = (Chains(),),
    ) -> None:
        self._builder = relax.BlockBuilder(mod)
        self.target = target
        self._constant = constant_weights
        self._named = named
        self._bins = tuple(bins)
        self._measuring = measuring
        self._weights = frozenset(weights)
        self._known = known
        self._kinds = kinds
        self._layers: dict[tuple[str, tuple[bool, ...], bool], Equal] = {}
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
        every = [tuple(kind.find(graph)) for kind in self._kinds]
        last = last_products(graph, {group.products[-1] for groups in every for group in groups})
        for kind, groups in zip(self._kinds, every, strict=True):
            owned = [with_own_operators(graph, group, last) for group in groups]
            found = [self._candidate(graph, group, kind) for group in owned]
            yield from (*found, *self._joined(graph, kind, found))

    def _joined(
        self, graph: Graph, kind: GroupKind, found: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """Groups of a kind that one kernel may compute together."""
        planned = [each.planned for each in found if isinstance(each.planned, PlannedChain)]
        of = {id(each.planned): each for each in found}
        for each in kind.joined(graph, planned, self.target):
            parts = [of[id(one)] for one in each.members]
            chain = self._timed(each, {})
            yield Candidate(
                tuple(name for one in parts for name in one.names),
                chain,
                parts=tuple(part for one in parts for part in one.parts),
                behind=sum(one.behind for one in parts),
            )

    def _candidate(self, graph: Graph, group: Group, kind: GroupKind) -> Candidate:
        parts = group.products
        names = tuple(str(each.name) for each in parts)
        try:
            with contained(PlanRefused, *_WHERE):
                planned = self.planned(graph, group, kind)
        except RefusedError as error:
            return Candidate(names, None, str(error))
        behind, kernel = 0.0, rates_of(self.target).fitted.eager_kernel
        # What was measured has all of a group.
        if not planned.words:
            planned = replace(planned, apart=kind.apart(graph, group) * kernel)
            behind = kernel if is_left_operand(graph, planned.output) else 0.0
        return Candidate(names, planned, parts=parts, behind=behind)

    def planned(self, graph: Graph, group: Group, kind: GroupKind) -> PlannedChain:
        """Plan a group, with as much as possible of what follows it as its epilogue.

        Symbolic rows are planned in each bin. Refused is a group that is no chain, or of which
        other code reads intermediates; the reason is that of the longest form.
        """
        refusals: list[RefusedError] = []
        for output, after in group.outputs(graph):
            inner = with_whole_operators(graph, [*group.before, *after], self._known)
            try:
                check_used_inside(graph, inner, output, group)
                module, given = graph.subgraph(inner, output, self._named)
                check_known([output, *given], self._known)
                return self._planned(graph, output, given, module, kind)
            except RefusedError as error:
                refusals.append(error)
        raise refusals[0]

    def _planned(
        self, graph: Graph, output: Var, given: tuple[Var, ...], module: Any, kind: GroupKind
    ) -> PlannedChain:
        """Plan a group that is a module of its own."""

        def plan(static: Any, sizes: Mapping[Var, int]) -> PlannedChain:
            outlined, plans = self._outlined(static, given, kind, bool(sizes))
            chain = PlannedChain(plans, None, output, given, outlined.summary, outlined, kind)
            return self._timed(chain, sizes)

        function = module["main"]
        if not self._bins or not symbols_of(function):
            return plan(module, {})
        rows = rows_of(output)
        kind.check_rows(function, rows)
        most = most_rows(rows, graph.attributes)
        return plan_rows(output, function, most, self._bins, plan)

    def _outlined(
        self, static: Any, given: Sequence[Var], kind: GroupKind, fewer_rows: bool
    ) -> tuple[Outlined, tuple[Plan | CascadePlan, ...]]:
        """A group as one function with its plans, or the refusal, once for equal layers."""
        stored = tuple(each in self._weights for each in given)

        def make() -> Any:
            try:
                outlined = kind.outlined(static)
                if not fewer_rows:  # of padded arguments a call has all rows
                    longer = {
                        each.name
                        for each in outlined.arguments
                        if each.value is not None or stored[each.position]
                    }
                    outlined = outlined.padded(longer)
                return outlined, self._ranked(outlined.func, kind)
            except RefusedError as error:
                return error

        # With names of the model, reports have those of each layer.
        known = self._layers.setdefault((kind.name, stored, fewer_rows), Equal())
        found = make() if self._named else known.find(static["main"], make)
        if isinstance(found, RefusedError):
            raise found.with_traceback(None)
        outlined, plans = found
        return outlined, plans

    def kernel(self, chain: PlannedChain, always: bool = False) -> Replacement:
        """See `crossfuse.relax.choice.Kernels`.

        Of symbolic rows, `always` schedules bins too in which the kernel is estimated to be slower.
        It refuses if no plan has a kernel; of symbolic rows with the reason of the first bin.
        """
        with contained(PlanRefused, *_WHERE):
            if isinstance(chain, PlannedRows):
                return self._picked(chain, always)
            name = self._names.find(chain.outlined.func, lambda: self._added(chain))
            return chain.call(name)

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
        func = chain.outlined.func

        def make() -> tuple[Any, tuple[BufferSpec, ...]]:
            image = self._kernel(chain, True)
            return image, buffer_specs(image)

        image, buffers = self._rows_images.find(func, make)
        check_kernel(buffers, [value_of(each, params) for each in chain.outlined.arguments])
        return self._rows_names.find(func, lambda: self._added_bin(chain, image))

    def _function(self, function: Any, name: str) -> GlobalVar:
        """Add a function to the module, equal ones once."""
        return self._functions.find(function, lambda: self._builder.add_func(function, name))

    def _ranked(self, func: Any, kind: GroupKind) -> tuple[Plan | CascadePlan, ...]:
        def make() -> str:
            return json.dumps([each.to_json() for each in kind.ranked(func, self.target)])

        def use(text: str) -> tuple[Plan | CascadePlan, ...]:
            return tuple(map(kind.plan.from_json, read(tuple[str, ...], text)))

        return self._plans.find(func, lambda: self._answer("plan", func, make, use, kind.name))

    def _timed(self, chain: PlannedChain, sizes: Mapping[Var, int]) -> PlannedChain:
        if self._measuring is None:
            return chain
        given = [
            Given(each.shape, each.dtype, cold=at > 0)
            for at, each in enumerate(chain.outlined.arguments)
        ]
        first = chain.outlined.arguments[0].position
        cold = [at != first for at in range(len(chain.given))]
        func = tvm.ir.save_json(chain.outlined.func)
        found = measured_kernels(
            self._measuring.timer,
            self.target,
            [func, str(self._constant), str(bool(sizes))],
            _label(chain.outlined.func, self.target),
            chain.kernels,
            lambda plan: self._of_plan(chain, plan, bool(sizes)),
            given,
            self._measuring.separate(chain.outputs, chain.given, cold, sizes),
        )
        return replace(chain, measured=found)

    def _added(self, chain: PlannedChain) -> GlobalVar:
        kernel = self._kernel(chain, False)
        # The variable has the type of what callers pass, where the kernel copies that.
        name = self._builder.add_func(_declared(kernel), chain.name)
        self._builder.update_func(name, kernel)
        return name

    def _added_bin(self, chain: PlannedChain, image: Any) -> GlobalVar:
        name = self._builder.add_func(image, f"{chain.name}_m{chain.outlined.M}")
        # Called by its name, which no pass that looks for dead code follows.
        self._builder.update_func(name, image.with_attr("global_symbol", name.name_hint))
        return name

    def _kernel(self, chain: PlannedChain, fewer_rows: bool) -> Any:
        def make() -> str:
            return str(tvm.ir.save_json(self._of_plan(chain, chain.ours, fewer_rows)))

        def use(text: str) -> Any:
            return ir.load_json(text, ir.PrimFunc)

        best = None if chain.measured is None else chain.ours.to_json()
        options = (str(self._constant), str(fewer_rows), str(best))
        return marked(self._answer("schedule", chain.outlined.func, make, use, *options))

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

    def _of_plan(self, chain: PlannedChain, plan: Any, fewer_rows: bool) -> Any:
        """The function of a chain, scheduled by a plan; refuses one that does not lower."""
        schedule = chain.kind.scheduled(chain.outlined.func, plan, self._constant)
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


def _label(func: Any, target: Device) -> str:
    given = (f"{each.name}{list(map(int, each.ty.shape))}" for each in func.params)
    return f"{' '.join(given)} {func.params[0].ty.dtype} for {target.name}"
