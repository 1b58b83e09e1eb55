"""Groups of bindings replaced by one call each."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, TypeVar

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, Var
from tvm.relax.utils import copy_with_new_vars

from crossfuse.relax.chains.outcome import BinOutcome
from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.chains.symbols import extents_of, is_symbolic, same_extents
from crossfuse.relax.graph import Graph, Node, with_bindings
from crossfuse.relax.operators import is_tensor
from crossfuse.relax.outline import Argument
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
        return relax.call_tir(self.function, list(given), out_ty=self._out)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """The call's result in the extents that it has in the model."""
        return relax.op.reshape(made, extents)

    @property
    def _out(self) -> Any:
        return self.results[0] if len(self.results) == 1 else list(self.results)


class NamedCall(Replacement):
    """A call of an external function by its name, which looks at shapes itself."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        name = str(self.function.name_hint)
        return relax.call_dps_packed(name, relax.Tuple(list(given)), out_ty=self._out)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """See `Replacement.reshaped`; a view, as TVM copies a reshape that a function returns."""
        return relax.op.memory.view(made, relax.ShapeExpr(extents))


class FunctionCall(Replacement):
    """A call of a Relax function."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        return Call(self.function, list(given))


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


# Calls of a chain's kernel, whose arguments are found among the values of the model.


Kind = TypeVar("Kind", bound=Replacement)


def call_of(
    kind: type[Kind],
    function: GlobalVar,
    chain: PlannedChain,
    given: Sequence[Any],
    output: Var,
    rows: Any = None,
) -> Kind:
    """The call of a chain's kernel on given values, with symbolic rows if there are any."""
    outlined = chain.outlined
    values = tuple(value_of(each, given) for each in outlined.arguments)
    pairs = zip(values, outlined.arguments, strict=True)
    shapes = tuple(_shape(value, each.shape, rows) for value, each in pairs)
    made = (outlined.M if rows is None else rows, outlined.L)
    result = relax.TensorType(made, outlined.output_dtype)
    return kind(function, values, shapes, (output,), (result,))


def call_of_nodes(function: GlobalVar, graph: Graph, members: frozenset[Node]) -> Replacement:
    """The call of a function of `crossfuse.relax.merge.merged` in the place of its nodes."""
    inputs = graph.inputs(members)
    outputs = tuple(each.var for each in graph.outputs(members))
    shapes = tuple(map(extents_of, inputs))
    return Replacement(
        function, inputs, shapes, outputs, tuple(each.ty for each in outputs), members
    )


def _shape(value: Any, shape: tuple[int, ...], rows: Any) -> tuple[Any, ...]:
    """The shape of a value in the kernel's parameters."""
    return shape if rows is None or not is_symbolic(value) else (rows, *shape[1:])


def value_of(argument: Argument, given: Sequence[Any]) -> Any:
    """The model's value that is an argument of a chain."""
    if argument.value is not None:
        return relax.const(argument.value, argument.dtype)
    return given[argument.position]


# Relax functions that choose the kernel of a bin by the number of rows of each call.

#: The most rows of a call that a function takes, None for all; and the function.
Leaf = tuple[int | None, GlobalVar]


def calling(function: Any, kernel: GlobalVar, chain: PlannedChain, rows: Any) -> Any:
    """A private function that computes a chain of symbolic rows by a call of its kernel.

    Reshapes in it are views, since they are in a dataflow block; memory that a branch of ``R.If``
    allocates itself TVM may reuse in the other branch.
    """
    result = relax.Var("result", function.ret_ty)
    call = call_of(NamedCall, kernel, chain, function.params, result, rows)
    return private(function, relax.SeqExpr([relax.DataflowBlock(call.bindings)], result))


def picking(function: Any, rows: Any, kernels: Mapping[int, GlobalVar], rest: GlobalVar) -> Any:
    """A private function that counts rows and calls one of several functions, by bisection.

    `kernels` are functions of the same parameters by the most rows that they take, few first;
    `rest` may be among them, where it is faster. It is called for more rows too, and for none.
    `rows` is an expression of symbols in the parameters' shapes.
    """
    leaves: list[Leaf] = [(0, rest)]
    for most, callee in [*kernels.items(), (None, rest)]:
        if callee.same_as(leaves[-1][1]):
            leaves.pop()
        leaves.append((most, callee))
    return private(function, _tree(function, rows, leaves))


def _tree(function: Any, rows: Any, leaves: Sequence[Leaf]) -> Any:
    result = relax.Var("result", function.ret_ty)
    if len(leaves) == 1:
        made = [relax.VarBinding(result, Call(leaves[0][1], list(function.params)))]
        return relax.SeqExpr([relax.BindingBlock(made)], result)
    half = len(leaves) // 2
    few = relax.Var("few", tvm.ir.PrimType("bool"))
    branches = (_tree(function, rows, each) for each in (leaves[:half], leaves[half:]))
    made = [
        relax.VarBinding(few, rows <= leaves[half - 1][0]),
        relax.VarBinding(result, relax.If(few, *branches)),
    ]
    return relax.SeqExpr([relax.BindingBlock(made)], result)


def private(function: Any, body: Any) -> Any:
    """A pure private function with the parameters and type of another, and variables of its own."""
    made = relax.Function(function.params, body, function.ret_ty, is_pure=True)
    return copy_with_new_vars(made)
