"""Calls of TIR functions: which can be merged, and marks by which our passes know kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, Op, Tuple, Var
from tvm.tirx import PrimFunc

from crossfuse import _tvm as ir
from crossfuse.relax.graph import CALL_TIR, Callee, Graph, Node, variables_of
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


class Equal:
    """Values by function; functions that differ in names alone share one."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Any, Any]]] = {}

    def find(self, func: Any, make: Callable[[], Any]) -> Any:
        """The value of a function, made if it is new."""
        alike = self._known.setdefault(int(ir.tvm_ffi.structural_hash(func)), [])
        for other, value in alike:
            if ir.tvm_ffi.structural_equal(func, other):
                return value
        alike.append((func, make()))
        return alike[-1][1]


def read_calls(mod: Any, block: Any) -> Graph:
    """Read a dataflow block of a module after ``LegalizeOps``, with the functions that it calls.

    Nodes that are no plain calls of TIR functions carry a reason.
    """
    nodes: list[Node] = []
    tuples: set[Any] = set()
    known: dict[Any, Any] = {}
    callees: dict[Any, Callee] = {}
    for place, binding in enumerate(block.bindings):
        func, reason = _called(mod, binding)
        value: Any = binding.value
        var = known.setdefault(binding.var, binding.var)
        callee = None
        if func is not None:
            callee = callees.setdefault(value.args[0], Callee(func))
            reads = tuple(known.setdefault(each, each) for each in value.args[1].fields)
            tuples |= {var} if isinstance(var.ty, relax.TupleType) else set()
        else:
            reads = variables_of(value, known)
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in tuples:
                reason = ""
        nodes.append(Node(place, binding, var, reads, callee, reason))
    results = (each.var for each in nodes if not isinstance(each.var, relax.DataflowVar))
    return _without_dead(Graph(tuple(nodes), frozenset(results)))


def _without_dead(graph: Graph) -> Graph:
    """A graph with the dead nodes barred from merging: they would make no output."""
    needed = set(graph.results)
    found: list[Node] = []
    for node in reversed(graph.nodes):
        if node.var in needed:
            needed |= set(node.reads)
        else:
            node = replace(node, callee=None, reason="nothing needs its result")
        found.append(node)
    return replace(graph, nodes=tuple(found[::-1]))


def _called(mod: Any, binding: Any) -> tuple[Any, str]:
    """The TIR function that a binding calls, or why it cannot be merged with others."""
    value = binding.value
    if not isinstance(binding, relax.VarBinding) or not isinstance(value, Call):
        return None, "it is no call of a TIR function"
    if not isinstance(value.op, Op) or value.op.name != CALL_TIR:
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
    # TVM's scatters take theirs so; its FuseTIR joins them with no tensor of another function.
    if not all(map(_begins_at_a_place, func.params)):
        return None, "it takes tensors that begin anywhere in their memory"
    return func, ""


def _begins_at_a_place(param: Any) -> bool:
    return ir.is_buffer_var(param) and isinstance(param.ty.elem_offset, tirx.IntImm)


def _results(kind: Any) -> list[Any]:
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _is_static(kind: Any) -> bool:
    if not isinstance(kind, relax.TensorType):
        return False
    extents = getattr(kind.shape, "values", None)
    return extents is not None and all(isinstance(each, tirx.IntImm) for each in extents)
