"""A Relax function, or a dataflow block of one, as a graph: bindings, and what reads what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, Tuple, Var
from tvm_ffi import structural_walk

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.relax.operators import (
    CAST,
    RESHAPES,
    check_elementwise,
    dtype_of,
    is_tensor,
    operator,
)
from crossfuse.workload.dtypes import FLOAT_TYPES

#: The operator that calls a TIR function.
CALL_TIR = "relax.call_tir"


@dataclass(frozen=True, eq=False)
class Callee:
    """A TIR function that nodes call; one object for all its calls in a block."""

    func: Any

    @cached_property
    def reduces(self) -> bool:
        """Whether a block of it is more than element-wise, as far as loops tell."""
        return _reduces(self.func)

    @cached_property
    def is_view(self) -> bool:
        """Whether it only gives a tensor another shape."""
        return bool(relax.analysis.has_reshape_pattern(self.func))


@dataclass(frozen=True, eq=False)
class Node:
    """A binding."""

    #: Its number in the graph.
    place: int
    binding: Any
    #: The variable that it binds.
    var: Any
    #: Variables that it uses, and constants that it passes to a function.
    reads: tuple[Any, ...]
    #: The function it calls, if it is a call of a TIR function that can be merged with others.
    callee: Callee | None = None
    #: Why it cannot be merged; empty if it can, and in graphs that calls are not read of.
    reason: str = ""

    @property
    def value(self) -> Any:
        """What the variable is bound to."""
        return self.binding.value

    @cached_property
    def operator(self) -> str:
        """Name of its operator; empty if it is no call of one."""
        try:
            return operator(self.value) if isinstance(self.value, Call) else ""
        except RefusedError:
            return ""

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether elements depend only on those at their own place, in row-major order."""
        if not self.operator or not is_tensor(self.var):
            return False
        if self.operator == CAST or self.operator in RESHAPES:
            return True
        try:
            check_elementwise(self.value)
        except RefusedError:
            return False
        return True

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """Tensors that its call takes."""
        known = {each: each for each in self.reads}  # each variable as one object of Python
        return tuple(known.get(each, each) for each in self.value.args if is_tensor(each))

    @property
    def func(self) -> Any:
        """The TIR function that it calls; None without a `callee`."""
        return None if self.callee is None else self.callee.func

    @property
    def name(self) -> str:
        """Name of the function that it calls, or of the variable."""
        if self.func is None:
            return str(self.var.name)
        return str(self.value.args[0].name_hint)

    @property
    def results(self) -> tuple[Any, ...]:
        """Types of the tensors that it makes."""
        is_tuple = isinstance(self.var.ty, relax.TupleType)
        return tuple(self.var.ty.fields) if is_tuple else (self.var.ty,)

    @property
    def reduces(self) -> bool:
        """Whether a block of its function is more than element-wise, as far as loops tell."""
        return self.callee is not None and self.callee.reduces

    @property
    def is_view(self) -> bool:
        """Whether it only gives a tensor another shape, which Relax does without a kernel."""
        return self.callee is not None and self.callee.is_view

    @property
    def is_element(self) -> bool:
        """Whether it takes one tensor out of a call's tuple."""
        return isinstance(self.value, relax.TupleGetItem)


@dataclass(frozen=True, eq=False)
class Graph:
    """Bindings in order, with what reads what.

    Each variable is one object of Python wherever it stands here, so that sets and mappings of
    variables need not ask TVM.
    """

    nodes: tuple[Node, ...]
    #: Variables that code behind the bindings reads.
    results: frozenset[Any]
    #: Parameters of the function, where all of it is read, and its attributes.
    params: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] | None = None

    @property
    def output(self) -> Any:
        """The only result."""
        (result,) = self.results
        return result

    @cached_property
    def makers(self) -> Mapping[Any, Node]:
        """The node that binds each variable."""
        return {each.var: each for each in self.nodes}

    @cached_property
    def readers(self) -> Mapping[Any, tuple[Node, ...]]:
        """Nodes that use each variable or constant, those from elsewhere too."""
        found: dict[Any, list[Node]] = {each.var: [] for each in self.nodes}
        for node in self.nodes:
            for var in dict.fromkeys(node.reads):
                found.setdefault(var, []).append(node)
        return {var: tuple(nodes) for var, nodes in found.items()}

    def sources(self, node: Node) -> tuple[Node, ...]:
        """Nodes whose results a node uses."""
        return tuple(self.makers[each] for each in node.reads if each in self.makers)

    def users(self, node: Node) -> tuple[Node, ...]:
        """Nodes that use a node's result."""
        return self.readers[node.var]

    def operator(self, value: Any) -> str:
        """Name of the operator that makes a value; empty for parameters and constants."""
        node = self.makers.get(value) if isinstance(value, Var) else None
        return "" if node is None else node.operator

    def arguments(self, value: Any) -> tuple[Any, ...]:
        """Tensors that a bound variable is made of."""
        return self.makers[value].arguments

    def is_elementwise(self, value: Any) -> bool:
        """Whether a value is made by an operator that is, see `Node.is_elementwise`."""
        return isinstance(value, Var) and value in self.makers and self.makers[value].is_elementwise

    def is_read_by_others(self, value: Any, nodes: Iterable[Any]) -> bool:
        """Whether a variable is a result, or read by bindings of other variables than these."""
        own = set(nodes)
        return value in self.results or any(each.var not in own for each in self.readers[value])

    def is_exact_cast(self, value: Any) -> bool:
        """Whether a value is a cast to a type that holds every value of the source's type."""
        if self.operator(value) != CAST:
            return False
        source, target = dtype_of(self.arguments(value)[0]), dtype_of(value)
        return source == target or (source in FLOAT_TYPES and target == "float32")

    def reach(self, target: Any, stops: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """The bindings that make a value, not looking behind `stops`, and the leaves they read.

        The bound variables up to `target` are in the order of binding; the leaves, which are stops,
        parameters and constants, in the order of first use.
        """
        stops = set(stops)
        pending, seen = [target], set()
        while pending:
            value = pending.pop()
            if value in self.makers and value not in stops and value not in seen:
                seen.add(value)
                pending += self.arguments(value)
        inner = sorted(seen, key=lambda each: self.makers[each].place)
        used = [a for v in inner for a in self.arguments(v)] if inner else [target]
        leaves: list[Any] = []
        for value in used:
            if value not in seen and not any(value.same_as(leaf) for leaf in leaves):
                leaves.append(value)
        return inner, leaves

    def inputs(self, members: Iterable[Node]) -> tuple[Any, ...]:
        """Tensors that members read and none of them makes, each once, in order of use."""
        return tuple(each for each in self._given(members) if not is_number(each))

    def numbers(self, members: Iterable[Node]) -> tuple[Any, ...]:
        """Constants of one element that members read, each once, in order of use."""
        return tuple(each for each in self._given(members) if is_number(each))

    def _given(self, members: Iterable[Node]) -> tuple[Any, ...]:
        nodes = in_order(members)
        made = {each.var for each in nodes}
        every = (var for each in nodes for var in each.reads)
        return tuple(dict.fromkeys(var for var in every if var not in made))

    def outputs(self, members: Iterable[Node]) -> tuple[Node, ...]:
        """Members whose results are needed outside."""
        own = set(members)
        return tuple(
            each
            for each in in_order(own)
            if each.var in self.results or any(user not in own for user in self.users(each))
        )

    def subgraph(
        self, inner: Sequence[Any], output: Any, named: bool = True
    ) -> tuple[Any, tuple[Any, ...]]:
        """Some bindings as a module of their own, and the variables its parameters stand for.

        `inner` is in the order of binding and contains `output`. Parameters have the names of what
        they stand for, or are numbered if not `named`, so that equal parts of a model are equal
        texts.
        """
        nodes = [self.makers[each] for each in inner]
        given = self._given(nodes)
        names = [str(each.name) if named else f"given_{i}" for i, each in enumerate(given)]
        params = [relax.Var(name, each.ty) for name, each in zip(names, given, strict=True)]
        image: dict[Any, Any] = dict(zip(given, params, strict=True))
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                emit_copies(builder, nodes, image, [output])
            builder.emit_func_output(image[output])
        return builder.get(), given


def read_graph(function: Any) -> Graph:
    """Read all bindings of a function that `clean` has normalised."""
    bindings = [each for block in function.body.blocks for each in block.bindings]
    known: dict[Any, Any] = {}
    nodes = [
        Node(place, each, known.setdefault(each.var, each.var), variables_of(each.value, known))
        for place, each in enumerate(bindings)
    ]
    results = frozenset(variables_of(function.body.body, known))
    return Graph(tuple(nodes), results, tuple(function.params), function.attrs)


def variables_of(value: Any, known: dict[Any, Any]) -> tuple[Any, ...]:
    """Relax variables that an expression reads, each once, as the objects that are `known`."""
    found: list[Any] = [value] if isinstance(value, Var) else []
    if not found:
        structural_walk(value, (Var, found.append))
    own = (each for each in found if not isinstance(each.ty, tvm.ir.PrimType))
    return tuple(dict.fromkeys(known.setdefault(each, each) for each in own))


def clean(mod: tvm.IRModule, *entries: str) -> tvm.IRModule:
    """Normalise a module: no repeated, renamed or dead bindings.

    Functions that none of the entries needs are dead too; none keeps all that others may call.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(list(entries)),
        ]
    )(mod)


def with_bindings(
    function: Any, change: Callable[[Any], Sequence[Any]], params: Sequence[Any] | None = None
) -> Any:
    """A function with the bindings that `change` makes of each of its blocks."""
    blocks = [type(each)(list(change(each))) for each in function.body.blocks]
    body = relax.SeqExpr(blocks, function.body.body)
    return with_body(function, body, function.params if params is None else params)


def with_body(function: Any, body: Any, params: Sequence[Any]) -> Any:
    """A function like another one, but for its body and its parameters."""
    kept = (function.ret_ty, function.is_pure, function.attrs, function.span)
    return relax.Function(list(params), body, *kept)


def emit_copies(
    builder: Any, nodes: Iterable[Node], image: dict[Any, Any], outputs: Iterable[Any] = ()
) -> None:
    """Emit bindings again, of what `image` has in the place of their variables; it gets theirs.

    `outputs` are variables that code behind the builder's block reads.
    """
    last = set(outputs)
    for node in nodes:
        emit = builder.emit_output if node.var in last else builder.emit
        image[node.var] = emit(_moved(node.value, image))


def fused_region(builder: Any, name: str, params: Sequence[Any], fuse: Any) -> Any:
    """The one TIR function that ``FuseTIR`` makes of a builder's primitive function.

    It fuses what another function calls, so one is added; `fuse` is that pass, or several.
    """
    region = builder.get().get_global_var(name)
    outer = [relax.Var(each.name, each.ty) for each in params]
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(Call(region, outer))
        builder.emit_func_output(result)
    fused = fuse(builder.get())
    (made,) = (each for each in fused.functions.values() if isinstance(each, ir.PrimFunc))
    return made


def _moved(value: Any, image: Mapping[Any, Any]) -> Any:
    """A call of other variables, or an element of another tuple."""
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(image[value.tuple_value], value.index)
    args = [
        relax.Tuple([image.get(each, each) for each in given.fields])
        if isinstance(given, Tuple)
        else image.get(given, given)
        for given in value.args
    ]
    return Call(value.op, args, value.attrs, value.ty_args)


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """Nodes by their places."""
    return sorted(nodes, key=lambda each: each.place)


def is_number(value: Any) -> bool:
    """Whether a value of a Relax function is a constant of one element."""
    return isinstance(value, GenericConst) and prod(value.value.shape) == 1


def elements_of(node: Node) -> int:
    """Elements of the largest tensor that a node of static shapes makes."""
    return max(prod(int(extent) for extent in each.shape.values) for each in node.results)


def _reduces(func: Any) -> bool:
    found: list[Any] = []
    ir.walk(func, (ir.SBlock, found.append))
    plain = all(isinstance(each.body, ir.BufferStore) or not len(each.iter_vars) for each in found)
    return not plain or any(
        int(axis.iter_type) != ir.IterVar.DataPar for each in found for axis in each.iter_vars
    )
