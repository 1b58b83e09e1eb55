"""A graph of torch as a Relax function, node by node: groups of one are groups of the other.

TVM's importer translates single operators. Operators that it does not know, or that depend on
symbols in more than shapes, are not translated: what they make is a parameter of the function, and
what they read is among its results, so that nothing that they need is fused away.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, mul
from typing import Any

import sympy
import torch
import tvm
from torch import fx
from tvm import relax, tirx
from tvm.ir import Var

from crossfuse.relax.converters import CONVERTERS
from crossfuse.relax.symbols import extents_of, same_extents
from crossfuse.relax.torch_import import draws, end_blocks
from crossfuse.torch.attention import attention_of
from crossfuse.torch.rewrite import extent
from crossfuse.workload.dtypes import FLOAT_TYPES

#: Operators whose results are slices one behind the other.
_PARTS = frozenset({"split.Tensor", "split_with_sizes.default"})
#: Operators whose numbers are extents of what they make, and say nothing about its elements.
_OF_SHAPE = frozenset({"view.default", "reshape.default", "_unsafe_view.default", "expand.default"})
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Element types that the importer is given; what has others is left to torch.
_TYPES = frozenset({*FLOAT_TYPES, "bool", "int32", "int64"})


@dataclass(frozen=True)
class Translation:
    """A graph as torch and as Relax have it."""

    #: With the function ``main``.
    module: tvm.IRModule
    #: Nodes of the graph by the variables that stand for what they make. Variables inside of what
    #: is one operator in torch have none.
    nodes: Mapping[Var, fx.Node]
    #: Operators that were left to torch, each once, in order: those that TVM does not know, and
    #: those of a type that kernels do not take, with the type.
    untranslated: tuple[str, ...]
    #: Names of nodes by those of variables; of a variable inside of an operator, such as the
    #: product in ``addmm``, that of the operator's node.
    names: Mapping[str, str]
    #: Variables in the shapes of tensors by torch's symbols.
    symbols: Mapping[sympy.Symbol, Var]


def translate(graph: fx.Graph) -> Translation:
    """Translate to Relax what TVM knows of a graph of aten operators.

    The graph has no mutation, and its nodes carry ``meta["val"]``, as AOTAutograd leaves them. An
    operator that the importer fails on is left out, and the walk starts again.
    """
    refused: set[Any] = set()
    while True:
        attempt = _Attempt(graph, refused)
        try:
            return attempt.translation()
        except _NotTranslated as error:
            end_blocks(error)
            refused.add(error.node.target)


class _NotTranslated(Exception):
    """The importer knows an operator, but not with these arguments."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(str(node.target))
        self.node = node


@dataclass(frozen=True)
class Part:
    """A slice of a tensor along one axis, which a node takes out of an operator's results."""

    #: The operator.
    source: fx.Node
    whole: fx.Node
    axis: int
    begin: int
    end: int

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Tensors that it reads."""
        return (self.whole,)

    def emit(self, importer: Any) -> Any:
        """Emit the slice; the importer has the whole."""
        value = importer.env[self.whole]
        sliced = relax.op.strided_slice(value, [self.axis], [self.begin], [self.end])
        return importer.block_builder.emit(sliced)


def part_of(node: fx.Node) -> Part | None:
    """The part of a tensor that a node takes; None where it is something else.

    Of symbolic extents nothing is taken.
    """
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, place = node.args
    if getattr(source.target, "__name__", "") not in _PARTS or not isinstance(place, int):
        return None
    whole = source.args[0]
    told: Any = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else 0)
    parts = source.meta["val"]
    axis = told % parts[0].dim()
    ends = [*accumulate(each.shape[axis] for each in parts)]
    if not isinstance(whole, fx.Node) or not all(isinstance(each, int) for each in ends):
        return None
    return Part(source, whole, axis, ends[place] - parts[place].shape[axis], ends[place])


@dataclass(frozen=True)
class Extreme:
    """The largest or least elements along an axis, taken without their places."""

    #: The operator.
    source: fx.Node
    whole: fx.Node
    axis: int
    keepdims: bool
    largest: bool

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Tensors that it reads."""
        return (self.whole,)

    def emit(self, importer: Any) -> Any:
        """Emit the reduction; the importer has the whole."""
        reduce = relax.op.max if self.largest else relax.op.min
        made = reduce(importer.env[self.whole], self.axis, keepdims=self.keepdims)
        return importer.block_builder.emit(made)


def extreme_of(node: fx.Node) -> Extreme | None:
    """The extremes that a node takes; None of other nodes, and where something needs places too."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, place = node.args
    name = getattr(source.target, "__name__", "")
    if name not in ("max.dim", "min.dim") or place != 0 or list(source.users) != [node]:
        return None
    whole, axis, *more = source.args
    keep = source.kwargs.get("keepdim", more[0] if more else False)
    floating = isinstance(whole, fx.Node) and whole.meta["val"].is_floating_point()
    return Extreme(source, whole, axis, keep, name == "max.dim") if floating else None


class _Attempt:
    """One walk over a graph, in which some operators are left out."""

    def __init__(self, graph: fx.Graph, refused: set[Any]) -> None:
        from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

        self._graph = graph
        self._refused = refused
        self._elsewhere = _elsewhere(graph)
        found = ((each, _taken(each)) for each in graph.nodes)
        #: What nodes take out of the results of operators that give several.
        self._taken = {node: each for node, each in found if each is not None}
        self._symbols: dict[sympy.Symbol, Var] = {}
        self._importer = ExportedProgramImporter()
        self._known = {**self._importer.convert_map, **CONVERTERS}

    def translation(self) -> Translation:
        """Translate all nodes; `_NotTranslated` is raised where the importer fails on one."""
        inside = dict.fromkeys(each for each in self._graph.nodes if self._is_known(each))
        given = [each for each in self._graph.nodes if each not in inside and self._takes(each)]
        env: dict[fx.Node, Any] = {each: relax.Var(each.name, self._type(each)) for each in given}
        params = [*env.values()]
        env |= {each: self._size(each.meta["val"]) for each in self._graph.nodes if is_size(each)}
        builder = self._importer.block_builder = relax.BlockBuilder()
        self._importer.env = env
        with builder.function("main", params):
            with builder.dataflow():
                for node in inside:
                    env[node] = self._convert(node)
                needed = [env[each] for each in inside if self._is_needed(each, inside)]
                results = builder.emit_output(relax.Tuple(needed))
            builder.emit_func_output(results)
        # What only gives another name to a value, as a view of the same shape may, stays behind it.
        made = [(each, value) for each, value in env.items() if not is_size(each)]
        nodes = {value: each for each, value in reversed(made) if isinstance(value, Var)}
        names = dict.fromkeys(self._left(each) for each in self._graph.nodes if each not in inside)
        names.pop("", None)
        module = builder.get()
        known = _names(module["main"], nodes)
        return Translation(module, nodes, tuple(names), known, self._symbols)

    def _is_known(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target in self._refused or not self._takes(node):
            return False
        if node in self._taken:
            return all(map(self._takes, self._taken[node].reads))
        if getattr(node.target, "__name__", "") not in self._known or _writes(node) or draws(node):
            return False
        sizes = [each for each in node.all_input_nodes if is_size(each)]
        if sizes and node.target.__name__ not in _OF_SHAPE:
            return False
        known = all(self._size(each.meta["val"]) is not None for each in sizes)
        return known and all(is_size(each) or self._takes(each) for each in node.all_input_nodes)

    def _takes(self, node: fx.Node) -> bool:
        """Whether what a node makes is a tensor that kernels may read or write."""
        return node not in self._elsewhere and self._type(node) is not None

    def _convert(self, node: fx.Node) -> Any:
        try:
            value = self._emitted(node)
        except Exception as error:  # converters raise whatever they like
            raise _NotTranslated(node) from error
        if not isinstance(value, Var) or not _same_type(value, self._type(node)):
            raise _NotTranslated(node)
        return value

    def _emitted(self, node: fx.Node) -> Any:
        if node in self._taken:
            return self._taken[node].emit(self._importer)
        name = node.target.__name__
        extra = (self._importer,) if name in CONVERTERS else ()
        return self._known[name](node, *extra)

    def _is_needed(self, node: fx.Node, inside: Container[fx.Node]) -> bool:
        through = {found.source for each, found in self._taken.items() if each in inside}
        users = (each for each in node.users if each not in through)
        return any(user not in inside and not is_size(user) for user in users)

    def _left(self, node: fx.Node) -> str:
        """The operator of a node that was left to torch; empty where that needs no report."""
        if node.op != "call_function" or node.target is operator.getitem:
            return ""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _dtype(value) not in _TYPES:
            return f"{node.target} of {_dtype(value)}"
        return str(node.target) if self._type(node) and not _is_symbolic(node) else ""

    def _type(self, node: fx.Node) -> Any:
        """The Relax type of what a node makes; None if kernels take no such tensor."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None
        shape = [self._size(each) for each in value.shape]
        nothing = any(isinstance(each, int) and each == 0 for each in shape)
        if _dtype(value) not in _TYPES or nothing or any(each is None for each in shape):
            return None
        return relax.TensorType(shape, _dtype(value))

    def _size(self, size: Any) -> Any:
        """A size as a number or as an expression of `_symbols`; None if it is none of these."""
        if isinstance(size, int):
            return size
        if not isinstance(size, torch.SymInt):
            return None
        return self._expression(extent(size))

    def _expression(self, given: sympy.Expr) -> Any:
        if given.is_Integer:
            return tirx.IntImm("int64", int(given))
        if given.is_Symbol:
            return self._symbols.setdefault(given, tirx.Var(str(given), "int64"))
        parts = [self._expression(each) for each in given.args]
        if not (given.is_Add or given.is_Mul) or any(each is None for each in parts):
            return None
        return reduce(add if given.is_Add else mul, parts)


def _taken(node: fx.Node) -> Any:
    """What a node takes out of an operator's results, if that is known."""
    return attention_of(node) or part_of(node) or extreme_of(node)


def is_size(node: fx.Node) -> bool:
    """Whether what a node makes is a number that may differ from run to run."""
    return isinstance(node.meta.get("val"), _SYMBOLS)


def _elsewhere(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes of a GPU's graph that make a tensor on the CPU, which no kernel reads.

    Operators of torch read it from there if it has no axes.
    """
    values = {each: each.meta.get("val") for each in graph.nodes}
    kinds = {k: v.device.type for k, v in values.items() if isinstance(v, torch.Tensor)}
    if set(kinds.values()) <= {"cpu"}:
        return frozenset()
    return frozenset(each for each, kind in kinds.items() if kind == "cpu")


def _names(function: Any, nodes: Mapping[Var, fx.Node]) -> dict[str, str]:
    """Names of nodes by those of variables: what one operator binds comes before its result."""
    found: dict[str, str] = {}
    inside: list[str] = []
    for binding in (each for block in function.body.blocks for each in block.bindings):
        inside.append(str(binding.var.name))
        if binding.var in nodes:
            found |= dict.fromkeys(inside, nodes[binding.var].name)
            inside = []
    return found


def _writes(node: fx.Node) -> bool:
    """Whether an operator mutates what it is given, such as inputs at the end of a graph.

    The importer takes what is read of it for what it becomes, also where it was read before.
    """
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _is_symbolic(node: fx.Node) -> bool:
    """Whether the shape of what a node makes, or its elements, depend on symbols."""
    values = (each.meta.get("val") for each in (node, *node.all_input_nodes))
    sizes = (each for value in values for each in getattr(value, "shape", (value,)))
    return any(isinstance(each, _SYMBOLS) for each in sizes)


def _same_type(value: Any, due: Any) -> bool:
    """Whether a tensor has the type that torch says, for all values of the symbols."""
    kind = value.ty
    if not isinstance(kind, relax.TensorType) or kind.shape is None or kind.dtype != due.dtype:
        return False
    return same_extents(extents_of(value), due.shape.values)
