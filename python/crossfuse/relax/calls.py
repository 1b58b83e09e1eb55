"""Dataflow blocks of legalised Relax functions as graphs of calls of TIR functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, Op, Tuple, Var
from tvm.tirx import PrimFunc

from crossfuse import _tvm as ir
from crossfuse.schema import parse

# Attributes of functions by which our passes know each other's work.

#: TVM's attribute of functions that have their schedule.
SCHEDULED = "tirx.is_scheduled"
#: Ours, of scheduled functions that `crossfuse.relax.BuildKernels` is to build.
KERNEL = "crossfuse.kernel"
#: The plan that a function was scheduled by, in JSON.
PLAN = "crossfuse.plan"
#: Of Relax functions that compute a chain where no kernel does; passes leave them alone.
REST = "crossfuse.rest"


def marked(func: Any) -> Any:
    """A scheduled function marked as a kernel; the module gives it a new name."""
    return func.without_attr("global_symbol").with_attr({SCHEDULED: True, KERNEL: True})


def is_kernel(func: Any) -> bool:
    """Whether a function is `marked` as a kernel."""
    return isinstance(func, ir.PrimFunc) and bool(func.attrs) and KERNEL in func.attrs


def is_rest(function: Any) -> bool:
    """Whether a Relax function computes a chain where none of its kernels does."""
    return bool(function.attrs) and REST in function.attrs


def with_plan(func: Any, plan: Mapping[str, Any]) -> Any:
    """A scheduled function that carries its plan, which its library then records."""
    return func.with_attr(PLAN, json.dumps(plan, sort_keys=True))


def recorded(func: Any) -> dict[str, Any]:
    """Metadata for the library of a function: its plan, if it carries one."""
    text = (func.attrs or {}).get(PLAN)
    return {} if text is None else {"plan": parse(str(text))}


_CALL = "relax.call_tir"


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
    """A binding of a dataflow block."""

    #: Its number in the block.
    place: int
    binding: Any
    #: The variable that it binds.
    var: Any
    #: The function it calls, if it is a call of a TIR function that can be merged with others.
    callee: Callee | None
    #: Variables and constants that it uses.
    reads: tuple[Any, ...]
    #: Why it cannot be merged; empty if it can.
    reason: str = ""

    @property
    def func(self) -> Any:
        """The TIR function that it calls; None without a `callee`."""
        return None if self.callee is None else self.callee.func

    @property
    def name(self) -> str:
        """Name of the function that it calls, or of the variable."""
        if self.func is None:
            return str(self.var.name)
        return str(self.binding.value.args[0].name_hint)

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
        return isinstance(self.binding.value, relax.TupleGetItem)


@dataclass(frozen=True, eq=False)
class Flow:
    """A dataflow block as a graph: its bindings in order."""

    nodes: tuple[Node, ...]

    @cached_property
    def makers(self) -> Mapping[Any, Node]:
        """The node that binds each variable."""
        return {each.var: each for each in self.nodes}

    @cached_property
    def readers(self) -> Mapping[Any, tuple[Node, ...]]:
        """Nodes that use each variable or constant, including variables of other blocks."""
        found: dict[Any, list[Node]] = {each.var: [] for each in self.nodes}
        for node in self.nodes:
            for var in dict.fromkeys(node.reads):
                found.setdefault(var, []).append(node)
        return {var: tuple(nodes) for var, nodes in found.items()}

    def sources(self, node: Node) -> tuple[Node, ...]:
        """Nodes of the block whose results a node uses."""
        return tuple(self.makers[each] for each in node.reads if each in self.makers)

    def users(self, node: Node) -> tuple[Node, ...]:
        """Nodes of the block that use a node's result."""
        return self.readers[node.var]

    def leaves_block(self, node: Node) -> bool:
        """Whether code behind the block uses a node's result."""
        return not isinstance(node.var, relax.DataflowVar)

    def inputs(self, members: Iterable[Node]) -> tuple[Any, ...]:
        """Tensors that members read and none of them makes, each once, in order of use."""
        return tuple(each for each in self._given(members) if not is_number(each))

    def numbers(self, members: Iterable[Node]) -> tuple[Any, ...]:
        """Constants of one element that members read, each once, in order of use."""
        return tuple(each for each in self._given(members) if is_number(each))

    def _given(self, members: Iterable[Node]) -> tuple[Any, ...]:
        nodes = sorted(members, key=lambda each: each.place)
        made = {each.var for each in nodes}
        every = (var for each in nodes for var in each.reads)
        return tuple(dict.fromkeys(var for var in every if var not in made))

    def outputs(self, members: Iterable[Node]) -> tuple[Node, ...]:
        """Members whose results are needed outside."""
        own = set(members)
        return tuple(
            each
            for each in sorted(own, key=lambda each: each.place)
            if self.leaves_block(each) or any(user not in own for user in self.users(each))
        )


def read_flow(mod: Any, block: Any) -> Flow:
    """Read a dataflow block of a module after ``LegalizeOps``.

    All bindings become nodes; those that are no plain calls of TIR functions carry a reason.
    """
    nodes: list[Node] = []
    tuples: set[Any] = set()
    # One object of Python for each variable and function: sets of them then need not ask TVM.
    known: dict[Any, Any] = {}
    callees: dict[Any, Callee] = {}
    for place, binding in enumerate(block.bindings):
        func, reason = _called(mod, binding)
        value: Any = binding.value
        var = known.setdefault(binding.var, binding.var)
        callee = None
        if func is not None:
            callee = callees.setdefault(value.args[0], Callee(func))
            reads = tuple(value.args[1].fields)
            tuples |= {var} if isinstance(var.ty, relax.TupleType) else set()
        else:
            reads = tuple(relax.analysis.free_vars(value))
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in tuples:
                reason = ""
        reads = tuple(known.setdefault(each, each) for each in reads)
        nodes.append(Node(place, binding, var, callee, reads, reason))
    return Flow(tuple(_without_dead(nodes)))


def _without_dead(nodes: list[Node]) -> list[Node]:
    """Nodes, with the dead ones barred from merging: they would make no output."""
    needed: set[Any] = set()
    found: list[Node] = []
    for node in reversed(nodes):
        if node.var in needed or not isinstance(node.var, relax.DataflowVar):
            needed |= set(node.reads)
        else:
            node = replace(node, callee=None, reason="nothing needs its result")
        found.append(node)
    return found[::-1]


def _called(mod: Any, binding: Any) -> tuple[Any, str]:
    """The TIR function that a binding calls, or why it cannot be merged with others."""
    value = binding.value
    if not isinstance(binding, relax.VarBinding) or not isinstance(value, Call):
        return None, "it is no call of a TIR function"
    if not isinstance(value.op, Op) or value.op.name != _CALL:
        name = getattr(value.op, "name", "") or getattr(value.op, "name_hint", "")
        return None, f"it calls {name or value.op}, which is no TIR function"
    callee, given, *more = value.args
    func = mod[callee] if isinstance(callee, GlobalVar) else None
    if not isinstance(func, PrimFunc) or not isinstance(given, Tuple) or more:
        return None, "it calls a TIR function with numbers or a tuple that is made elsewhere"
    if func.attrs and SCHEDULED in func.attrs:
        return None, "it is scheduled already"
    if not all(isinstance(each, Var | GenericConst) for each in given.fields):
        return None, "its arguments are expressions"
    types = [*(each.ty for each in given.fields), *_results(binding.var.ty)]
    if not all(map(_is_static, types)):
        return None, "it has tensors of symbolic shape, and kernels are written for one shape"
    return func, ""


def _results(kind: Any) -> list[Any]:
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _is_static(kind: Any) -> bool:
    if not isinstance(kind, relax.TensorType):
        return False
    extents = getattr(kind.shape, "values", None)
    return extents is not None and all(isinstance(each, tirx.IntImm) for each in extents)


def _reduces(func: Any) -> bool:
    found: list[Any] = []
    ir.walk(func, (ir.SBlock, found.append))
    plain = all(isinstance(each.body, ir.BufferStore) or not len(each.iter_vars) for each in found)
    return not plain or any(
        int(axis.iter_type) != ir.IterVar.DataPar for each in found for axis in each.iter_vars
    )


def is_number(value: Any) -> bool:
    """Whether a value of a Relax function is a constant of one element."""
    return isinstance(value, GenericConst) and prod(value.value.shape) == 1


def elements_of(node: Node) -> int:
    """Elements of the largest tensor that a node of static shapes makes."""
    return max(prod(int(extent) for extent in each.shape.values) for each in node.results)
