"""Cascades with products in a translated graph of torch: attention that is written as a formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.work import Pass
from crossfuse.hardware import Device
from crossfuse.measure.choice import Measured
from crossfuse.measure.job import Given
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, TILES
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.relax.calls import read_calls
from crossfuse.relax.cascades.groups import CascadeGroup, find_cascades
from crossfuse.relax.cascades.kernels import Cascades, Found, Kernel
from crossfuse.relax.choice import Candidate, PlannedGroup
from crossfuse.relax.fuse_cascades import text_of
from crossfuse.relax.graph import Graph, in_order, is_number, with_bindings
from crossfuse.relax.measured import Measuring, measured_kernels
from crossfuse.relax.operators import LEGAL, PRODUCT, dtype_of, shape_of
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import extents_of, is_symbolic
from crossfuse.torch.attention import is_attention, launches
from crossfuse.torch.separate import eager_form

#: The function that TVM makes of a product.
_LEGAL_PRODUCT = "matmul"
#: Products of attention, and the rank of what they multiply.
_PRODUCTS, _BATCHED = 2, 3


@dataclass(frozen=True)
class PlannedCascade(PlannedGroup):
    """A cascade with its plan and that of separate kernels."""

    group: CascadeGroup


class CascadeKernels:
    """Finds and plans cascades of products in a legalised graph, and collects their kernels.

    A kernel has to beat separate kernels of the products and of what lies between, as inductor
    makes them, or torch's own kernel of attention with what repeats its keys. Names of candidates
    are the operators that reduce.

    They begin and end with variables named as those in `known`, the nodes that they stand for,
    which stand in their calls: legalisation may bind new ones. With `measuring` kernels are timed.
    """

    def __init__(
        self, target: Device, known: Mapping[Var, fx.Node], measuring: Measuring | None
    ) -> None:
        self._target = target
        self._nodes = known
        self._known = {str(each.name): each for each in known}
        self._measuring = measuring
        self._callees: dict[Kernel, GlobalVar] = {}
        #: By what was found, and what torch launches instead.
        self._plans: dict[tuple[Found, tuple[Pass, ...]], tuple[CascadePlan, ...]] = {}

    @property
    def functions(self) -> dict[GlobalVar, Any]:
        """Scheduled functions of the kernels that were asked for."""
        return {callee: kernel.func for kernel, callee in self._callees.items()}

    def candidates(self, graph: Graph) -> Iterator[Candidate]:
        """See `crossfuse.relax.choice.Kernels`."""
        groups, refused = find_cascades(graph, Cascades(self._target, None, None))
        for group in (each for each in groups if each.kernel.form == TILES):
            names = tuple(str(each.var.name) for each in in_order(group.members) if each.reduces)
            reason = self._refusal(graph, group)
            yield Candidate(names, None if reason else self._planned(graph, group), reason)
        for each in refused:
            if _LEGAL_PRODUCT in each.calls:
                yield Candidate(each.calls, None, each.reason)

    def kernel(self, planned: PlannedCascade, always: bool) -> Replacement:
        """See `crossfuse.relax.choice.Kernels`."""
        name = f"crossfuse_cascade_{len(self._callees)}"
        callee = self._callees.setdefault(planned.group.kernel, GlobalVar(name))
        shapes = tuple(shape_of(each, str(each.name)) for each in planned.given)
        result = planned.output
        return Replacement(callee, planned.given, shapes, (result,), (result.ty,))

    def _refusal(self, graph: Graph, group: CascadeGroup) -> str:
        """Why torch could not call the kernel; empty if it can."""
        outputs, inputs = graph.outputs(group.members), graph.inputs(group.members)
        if len(outputs) != 1:
            names = ", ".join(str(each.var.name) for each in outputs)
            return f"others read {len(outputs)} results of it: {names}"
        for each in (*inputs, outputs[0].var):
            if not isinstance(each, Var) or str(each.name) not in self._known:
                return "it begins or ends inside of an operator"
        return ""

    def _planned(self, graph: Graph, group: CascadeGroup) -> PlannedCascade:
        site, derivation = group.found.site, group.found.derivation
        assert site is not None and derivation is not None
        (output,) = graph.outputs(group.members)
        given = tuple(self._known[str(each.name)] for each in graph.inputs(group.members))
        made = self._known[str(output.var.name)]
        launched = self._launches(made, given)
        # Of equal layers all but the names of what torch launches is equal.
        key = group.found, tuple(replace(each, name="") for each in launched)
        plans = self._plans.get(key)
        if plans is None:
            shape = cascade_shape(site, derivation)
            shape = replace(shape, passes=launched or shape.passes)
            plans = (
                *ranked_cascade(shape, self._target, only=tuple(CASCADE_FAMILIES), keep=1),
                *ranked_cascade(shape, self._target, only=(EAGER,)),
            )
            self._plans[key] = plans
        planned = PlannedCascade(plans, None, made, given, text_of(site), group)
        return replace(planned, measured=self._measured(planned))

    def _launches(self, output: Var, given: Iterable[Var]) -> tuple[Pass, ...]:
        """Kernels of torch where attention is one operator of it; none where it is a formula."""
        node, nodes = self._nodes[output], [self._nodes[each] for each in given]
        return launches(node, eager_form([node], nodes).inside)

    def _measured(self, planned: PlannedCascade) -> Measured | None:
        if self._measuring is None:
            return None
        kernel, given = planned.group.kernel, planned.given
        return measured_kernels(
            self._measuring.timer,
            self._target,
            [ir.tvm.ir.save_json(kernel.func)],
            planned.summary,
            [planned.ours],
            lambda _: kernel.func,
            [Given(shape_of(each, str(each.name)), dtype_of(each)) for each in given],
            self._measuring.separate((planned.output,), given, [True] * len(given), {}),
        )


def may_have_attention(graph: Graph) -> bool:
    """Whether two products have batches on both sides, as products with weights of layers do not.

    Those of symbolic shapes do not count: kernels of cascades are written for one shape.

    A quick look first: to search for cascades takes more than a second for each layer of a model.
    Norms and softmaxes without products are left: inductor reads and writes them once too.
    Attention that is one operator of torch is looked at where its queries are few
    (`crossfuse.torch.attention`); of many it is left, as a fused kernel of cuDNN or flash attention
    already, and inductor makes one of the usual formulas before we see them.
    """
    if any(is_attention(each.value) for each in graph.nodes):
        return True
    products = (graph.arguments(each.var) for each in graph.nodes if each.operator == PRODUCT)
    static = (operands for operands in products if not any(map(is_symbolic, operands)))
    ranks = (min(len(extents_of(each)) for each in operands) for operands in static)
    return sum(each >= _BATCHED for each in ranks) >= _PRODUCTS


def legalised(mod: Any) -> Graph:
    """The operators of a translated graph as calls of functions, without what nothing reads.

    Numbers that torch gave a name are read as numbers: a mask is known by them.
    """
    main = mod["main"]
    numbers = {
        each.var: each.value
        for block in main.body.blocks
        for each in block.bindings
        if is_number(each.value)
    }

    def with_numbers(block: Any) -> list[Any]:
        return [
            relax.VarBinding(each.var, ir.mutate(each.value, (Var, number)))
            for each in block.bindings
        ]

    def number(var: Any, _: Any) -> Any:
        return numbers.get(var, var)

    if numbers:
        mod = mod.clone()
        mod.update_func(mod.get_global_var("main"), with_bindings(main, with_numbers))
    passes = [relax.transform.DeadCodeElimination(), relax.transform.LegalizeOps(dict(LEGAL))]
    legal = ir.tvm.ir.transform.Sequential(passes)(mod)
    (block,) = legal["main"].body.blocks
    return read_calls(legal, block)
