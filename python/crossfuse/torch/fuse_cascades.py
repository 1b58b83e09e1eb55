"""Cascades with products in a graph of torch: attention that is written as a formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx
from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse import _tvm as ir
from crossfuse.hardware import Device
from crossfuse.measure.choice import Measured
from crossfuse.measure.way import Given
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import CASCADE_FAMILIES, EAGER
from crossfuse.relax.calls import read_calls
from crossfuse.relax.cascades.forms import Forms
from crossfuse.relax.cascades.found import TILES, Kernel
from crossfuse.relax.cascades.groups import Group, Refused, find_groups
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.chains.planned import left
from crossfuse.relax.fuse_cascades import text_of
from crossfuse.relax.graph import Graph, read_graph
from crossfuse.relax.measured import Contestant, Measuring, measured_kernels
from crossfuse.relax.operators import GATHER, PRODUCT, dtype_of, shape_of
from crossfuse.relax.replace import Replacement
from crossfuse.torch.graph_cache import Fused, Step, replaced
from crossfuse.torch.kernels import offer_kernels
from crossfuse.torch.separate import Timing
from crossfuse.torch.translate import Translation, translate

#: The function that TVM makes of a product.
_LEGAL_PRODUCT = "matmul"
#: Products of attention, and the rank of what they multiply.
_PRODUCTS, _BATCHED = 2, 3


def fuse_cascades(
    module: fx.GraphModule,
    target: Device,
    always: bool,
    cpu: bool,
    timing: Timing | None = None,
) -> Fused:
    """Replace cascades with products by kernels, in place.

    They are looked for where products multiply batches by batches, in a graph that
    `crossfuse.torch.fuse_graph.fuse_chains` left. A kernel has to beat separate kernels of the
    products and of what lies between, as inductor makes them. Norms and softmaxes without products
    are left: inductor reads and writes them once too. Attention that is one operator of torch is
    left as well: it is a fused kernel of cuDNN or flash attention already, and inductor makes one
    of the usual formulas before we see them. ``products`` of outcomes are the operators that
    reduce.
    """
    translation = translate(module.graph)
    if not _may_have_attention(translation):
        return Fused()
    legal = relax.transform.LegalizeOps(dict(GATHER))(translation.module)
    measuring = None if timing is None else timing.of(translation.nodes)
    made = _Made(translation, always, measuring)
    for block in legal["main"].body.blocks:
        if isinstance(block, relax.DataflowBlock):
            graph = read_calls(legal, block)
            groups, refused = find_groups(graph, Forms(target, None, None))
            for group in (each for each in groups if each.kernel.form == TILES):
                made.take(graph, group, target)
            made.outcomes += [_left(each) for each in refused if _LEGAL_PRODUCT in each.calls]
    step = Step()
    if made.replaced:
        kernels = offer_kernels(made.replaced, made.functions, target, cpu)
        step = replaced(module, translation.nodes, made.replaced, kernels)
    return Fused(tuple(made.outcomes), step)


class _Made:
    """Collects the cascades of a graph that become kernels, and the outcomes of all."""

    def __init__(self, translation: Translation, always: bool, measuring: Measuring | None) -> None:
        self._measuring = measuring
        self._names = translation.names
        self._always = always
        #: Legalisation may bind new variables, of the same names.
        self._results = {str(each.name): each for each in translation.nodes}
        self._callees: dict[Kernel, GlobalVar] = {}
        self.functions: dict[GlobalVar, Any] = {}
        self.replaced: dict[Var, Replacement] = {}
        self.outcomes: list[ChainOutcome] = []

    def take(self, graph: Graph, group: Group, target: Device) -> None:
        """Judge a cascade, and put a kernel in its place if that pays."""
        plans = _plans(group, target)
        ours = next(each for each in plans if each.family != EAGER)
        eager = next(each.microseconds for each in plans if each.family == EAGER)
        blank = ChainOutcome(
            "main", self._reductions(group), "", ours.family, ours.microseconds, eager, ""
        )
        reason = self._refusal(graph, group)
        if reason:
            self.outcomes.append(replace(blank, text=reason))
            return
        found = self._measured(graph, group, ours, target)
        if found is not None:
            times = found.times or (ours.microseconds, eager)
            blank = replace(
                blank, microseconds=times[0], eager_microseconds=times[1], measured=found.text
            )
        text = left(eager - ours.microseconds, found, self._always)
        if text:
            self.outcomes.append(replace(blank, family=EAGER, text=text))
        else:
            call = self._call(graph, group)
            self.outcomes.append(
                replace(blank, name=str(call.function.name_hint), text=text_of(group.found.site))
            )

    def _measured(
        self, graph: Graph, group: Group, ours: CascadePlan, target: Device
    ) -> Measured | None:
        """Time the kernel and separate ones; None if nothing is measured."""
        if self._measuring is None:
            return None
        (output,) = graph.outputs(group.members)
        inputs = [self._results[str(each.name)] for each in graph.inputs(group.members)]
        given = [Given(shape_of(each, str(each.name)), dtype_of(each)) for each in inputs]
        return measured_kernels(
            self._measuring.timer,
            target,
            [ir.tvm.ir.save_json(group.kernel.func)],
            text_of(group.found.site),
            [Contestant(ours, lambda: group.kernel.func)],
            given,
            self._measuring.separate(
                self._results[str(output.var.name)], inputs, [True] * len(inputs)
            ),
        )

    def _reductions(self, group: Group) -> tuple[str, ...]:
        """Torch's names of the operators that reduce."""
        nodes = sorted(group.members, key=lambda each: each.place)
        found = [str(each.var.name) for each in nodes if each.reduces]
        return tuple(dict.fromkeys(self._names.get(each, each) for each in found))

    def _refusal(self, graph: Graph, group: Group) -> str:
        """Why torch could not call the kernel; empty if it can."""
        outputs, inputs = graph.outputs(group.members), graph.inputs(group.members)
        if len(outputs) != 1:
            names = ", ".join(str(each.var.name) for each in outputs)
            return f"others read {len(outputs)} results of it: {names}"
        for each in (*inputs, outputs[0].var):
            if not isinstance(each, Var) or str(each.name) not in self._results:
                return "it begins or ends inside of an operator"
        return ""

    def _call(self, graph: Graph, group: Group) -> Replacement:
        """Record the call of the kernel that takes the group's place."""
        (output,) = graph.outputs(group.members)
        inputs = [self._results[str(each.name)] for each in graph.inputs(group.members)]
        if group.kernel not in self._callees:
            callee = GlobalVar(f"crossfuse_cascade_{len(self._callees)}")
            self._callees[group.kernel] = callee
            self.functions[callee] = group.kernel.func
        variable = self._results[str(output.var.name)]
        shapes = tuple(shape_of(each, str(each.name)) for each in inputs)
        call = Replacement(
            self._callees[group.kernel], tuple(inputs), shapes, (variable,), (variable.ty,)
        )
        self.replaced[variable] = call
        return call


def _left(refused: Refused) -> ChainOutcome:
    """The outcome of a cascade that has no kernel."""
    return ChainOutcome("main", refused.calls, "", "", None, None, refused.reason)


def _plans(group: Group, target: Device) -> list[CascadePlan]:
    """The best plan of one kernel, then that of separate kernels."""
    site, derivation = group.found.site, group.found.derivation
    assert site is not None and derivation is not None
    shape = cascade_shape(site, derivation)
    ours = ranked_cascade(shape, target, only=CASCADE_FAMILIES, keep=1)
    return [*ours, *ranked_cascade(shape, target, only=(EAGER,))]


def _may_have_attention(translation: Translation) -> bool:
    """Whether two products have batches on both sides, as products with weights of layers do not.

    A quick look first: to search for cascades takes more than a second for each layer of a model.
    """
    graph = read_graph(translation.module["main"])
    products = (each.var for each in graph.nodes if each.operator == PRODUCT)
    ranks = (
        [len(shape_of(each, "an operand")) for each in graph.arguments(product)]
        for product in products
    )
    return sum(min(each) >= _BATCHED for each in ranks) >= _PRODUCTS
