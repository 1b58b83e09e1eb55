"""Groups of bindings replaced by one call each."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, Var

from crossfuse.relax.graph import Graph, Node, with_bindings
from crossfuse.relax.operators import is_tensor
from crossfuse.relax.outcome import BinOutcome
from crossfuse.relax.symbols import extents_of, is_symbolic, same_extents
from crossfuse.workload.dtypes import zeros_behind


@dataclass(frozen=True)
class Replacement:
    """A call of a TensorIR function that computes what some bindings do."""

    #: Its last parameters are its results.
    function: GlobalVar
    #: Variables or constants of the model; one may be a shape.
    inputs: tuple[Any, ...]
    #: Extents of the inputs in the function, of as many elements in the same order; symbolic ones
    #: may be among them. More elements where the function takes rows padded with zeros.
    shapes: tuple[tuple[Any, ...], ...]
    #: Variables of the model that it makes.
    outputs: tuple[Var, ...]
    #: Types of the function's results. One alone may have other extents than in the model.
    results: tuple[Any, ...]
    #: Nodes whose bindings go beside those of the outputs; what others leave unread is dead code.
    members: frozenset[Node] = frozenset()
    #: What became of each bin, if rows are symbolic.
    bins: tuple[BinOutcome, ...] = ()

    @property
    def shape(self) -> tuple[Any, ...]:
        """Extents of the function's only result."""
        (result,) = self.results
        return tuple(int(e) if isinstance(e, tirx.IntImm) else e for e in result.shape.values)

    @property
    def dtype(self) -> str:
        """Element type of the function's only result."""
        (result,) = self.results
        return str(result.dtype)

    @property
    def bindings(self) -> list[Any]:
        """Bindings of the outputs, the call between reshapes where extents differ in the model.

        Tensors whose rows are shorter in the model are padded with zeros; constants at compile
        time.
        """
        made: list[Any] = []
        pairs = zip(self.inputs, self.shapes, strict=True)
        call = self.call([_given(each, shape, made) for each, shape in pairs])
        if len(self.outputs) > 1:
            name = f"{self.function.name_hint}_results"
            whole = relax.DataflowVar(name, relax.TupleType(self.results))
            elements = [
                relax.VarBinding(each, relax.TupleGetItem(whole, place))
                for place, each in enumerate(self.outputs)
            ]
            return [*made, relax.VarBinding(whole, call), *elements]
        (variable,) = self.outputs
        due = extents_of(variable)
        if not same_extents(due, self.shape):
            flat = relax.DataflowVar(f"{variable.name}_rows", *self.results)
            made.append(relax.VarBinding(flat, call))
            call = self.reshaped(flat, due)
        return [*made, relax.VarBinding(variable, call)]

    def call(self, given: Sequence[Any]) -> Any:
        """The call with tensors of the function's extents."""
        return relax.call_tir(self.function, list(given), out_ty=self.out_ty)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """The call's result in the extents that it has in the model."""
        return relax.op.reshape(made, extents)

    @property
    def out_ty(self) -> Any:
        """Type of the call, or types of the results where there are several."""
        return self.results[0] if len(self.results) == 1 else list(self.results)


def with_replacements(function: Any, graph: Graph, replacements: Collection[Replacement]) -> Any:
    """A function in which calls stand for some bindings; what these alone read becomes dead."""
    nodes = iter(graph.nodes)
    return with_bindings(
        function, lambda block: replaced(graph, islice(nodes, len(block.bindings)), replacements)
    )


def replaced(graph: Graph, nodes: Iterable[Node], replacements: Iterable[Replacement]) -> list[Any]:
    """Bindings of a block in which one call stands for each group of nodes.

    Groups are disjoint, and no two of them need results of each other. Variables that are still
    used keep their identity, in an order in which everything is made before it is read.
    """
    units: dict[Node, frozenset[Node]] = {each: frozenset([each]) for each in nodes}
    calls: dict[frozenset[Node], Replacement] = {}
    for each in replacements:
        members = each.members.union(graph.makers[var] for var in each.outputs)
        if members <= units.keys():
            units |= dict.fromkeys(members, members)
            calls[members] = each
    bindings: list[Any] = []
    for unit in _ordered(graph, units, calls):
        bindings += calls[unit].bindings if unit in calls else [each.binding for each in unit]
    return bindings


def _ordered(
    graph: Graph,
    units: Mapping[Node, frozenset[Node]],
    calls: Mapping[frozenset[Node], Replacement],
) -> list[frozenset[Node]]:
    """Units after those that they read; of independent ones first the one that ends first."""
    waiting: dict[frozenset[Node], set[frozenset[Node]]] = {}
    readers: dict[frozenset[Node], list[frozenset[Node]]] = {}
    for unit in dict.fromkeys(units.values()):
        reads = (
            calls[unit].inputs if unit in calls else [var for each in unit for var in each.reads]
        )
        sources = (graph.makers[each] for each in reads if each in graph.makers)
        waiting[unit] = {units[each] for each in sources if each in units}
        for each in waiting[unit]:
            readers.setdefault(each, []).append(unit)

    def entry(unit: frozenset[Node]) -> tuple[int, frozenset[Node]]:
        return (max(each.place for each in unit), unit)

    ready = [entry(unit) for unit, needed in waiting.items() if not needed]
    heapq.heapify(ready)
    found: list[frozenset[Node]] = []
    while ready:
        _, unit = heapq.heappop(ready)
        found.append(unit)
        for each in readers.get(unit, ()):
            waiting[each].remove(unit)
            if not waiting[each]:
                heapq.heappush(ready, entry(each))
    assert len(found) == len(waiting)  # groups that need results of each other are never replaced
    return found


def _given(value: Any, shape: Sequence[Any], made: list[Any]) -> Any:
    """A value in the extents of the function's parameter; bindings for it are added to `made`."""
    if not is_tensor(value) or same_extents(extents_of(value), shape):
        return value
    zeros = 0 if is_symbolic(value) else zeros_behind(shape, prod(map(int, extents_of(value))))
    short = (*shape[:-1], shape[-1] - zeros) if zeros else shape
    behind = [(0, 0)] * (len(shape) - 1) + [(0, zeros)]
    if zeros and isinstance(value, GenericConst):
        return relax.const(np.pad(value.value.numpy().reshape(short), behind), _dtype(value))
    if not same_extents(extents_of(value), short):
        value = _bound("rows", relax.op.reshape(value, short), value, short, made)
    if zeros:
        value = _bound("padded", relax.op.nn.pad(value, [*sum(behind, ())]), value, shape, made)
    return value


def _bound(what: str, call: Any, value: Any, shape: Sequence[Any], made: list[Any]) -> Any:
    """A variable bound, in `made`, to a call that transforms a value."""
    assert isinstance(call, Call)
    name = f"{getattr(value, 'name', 'constant')}_{what}"
    variable = relax.DataflowVar(name, relax.TensorType(shape, _dtype(value)))
    made.append(relax.VarBinding(variable, call))
    return variable


def _dtype(value: Any) -> str:
    return str(value.ty.dtype)


def call_of_nodes(function: GlobalVar, graph: Graph, members: frozenset[Node]) -> Replacement:
    """The call of a function of `crossfuse.relax.merge.merged` in the place of its nodes."""
    inputs = graph.inputs(members)
    outputs = tuple(each.var for each in graph.outputs(members))
    shapes = tuple(map(extents_of, inputs))
    return Replacement(
        function, inputs, shapes, outputs, tuple(each.ty for each in outputs), members
    )
