"""Calls of TIR functions: which can be merged, and marks by which our passes know kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tvm import relax, tirx
from tvm.ir import Call, GenericConst, GlobalVar, Op, Tuple, Var
from tvm.tirx import PrimFunc

from crossfuse import _tvm as ir
from crossfuse.lower.image import starting_early
from crossfuse.markers import starts_early
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


# Kernels of a model that start early: which calls do, and what they load before they wait.
#
# A call starts early if it needs what another kernel of ours makes in the same graph. The first of
# such a chain starts when all before it is over, whoever launched that, so what was written before
# it is there for the whole chain. What nothing in the graph writes, weights above all, may then be
# loaded by kernels of the chain at any time; what the graph makes is waited for.

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel, as far as its start is concerned."""

    #: Name of the kernel.
    function: Any
    #: Whether it needs what another kernel makes in the same graph.
    follows: bool = False
    #: Which of its arguments nothing in the graph writes, by their places.
    constant: frozenset[int] = frozenset()

    def is_first(self, functions: Mapping[Any, Any]) -> bool:
        """Whether it begins a chain, though its kernel starts early in other calls."""
        return not self.follows and starts_early(functions[self.function])


def with_early_starts(
    functions: Mapping[Name, Any], calls: Collection[KernelCall]
) -> dict[Name, Any]:
    """Scheduled functions, of which those start early that some call has follow another kernel.

    All calls of a function share a kernel, so what it loads before it waits is constant in each of
    them that follows another one.
    """
    made = dict(functions)
    for name, func in functions.items():
        behind = [each.constant for each in calls if each.function == name and each.follows]
        if behind:
            places = frozenset.intersection(*behind)
            names = [str(each.name) for place, each in enumerate(func.params) if place in places]
            made[name] = starting_early(func, names)
    return made


# Calls in functions of Relax, before kernels are built.


def calls_of(mod: Any) -> dict[Var, KernelCall]:
    """Calls of kernels in the Relax functions of a module, by the variables that they make."""
    found: dict[Var, KernelCall] = {}
    kernels = {name for name, func in mod.functions_items() if is_kernel(func)}
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            found |= _calls(function, kernels)
    return found


def _calls(function: Any, kernels: Collection[GlobalVar]) -> dict[Var, KernelCall]:
    """Calls in the blocks of a function; those in branches begin chains of their own."""
    bindings = [each for block in function.body.blocks for each in block.bindings]
    read_only = set(function.params) - set(_touched(bindings))
    found: dict[Var, KernelCall] = {}
    behind: set[Var] = set()
    for each in bindings:
        value = each.value
        callee = kernel_of(value, kernels)
        if callee is not None:
            given = value.args[1].fields
            constant = (n for n, x in enumerate(given) if not isinstance(x, Var) or x in read_only)
            follows = any(x in behind for x in given if isinstance(x, Var))
            found[each.var] = KernelCall(callee, follows, frozenset(constant))
        if callee is not None or any(x in behind for x in variables_of(value, {})):
            behind.add(each.var)
    return found


def kernel_of(value: Any, kernels: Collection[GlobalVar]) -> GlobalVar | None:
    """The kernel that a value calls, or None."""
    if not isinstance(value, Call) or getattr(value.op, "name", "") != CALL_TIR:
        return None
    return next((each for each in kernels if value.args[0].same_as(each)), None)


def _touched(bindings: Iterable[Any]) -> Iterable[Var]:
    """Variables that something takes which is no plain call of a TensorIR function."""
    for each in bindings:
        if not isinstance(each.value, Call) or getattr(each.value.op, "name", "") != CALL_TIR:
            yield from variables_of(each.value, {})
