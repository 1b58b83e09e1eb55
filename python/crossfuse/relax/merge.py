"""Calls of a dataflow block as one TIR function, and a block with such functions in their place."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from crossfuse import _tvm as ir
from crossfuse.relax.calls import Flow, Node


@dataclass(frozen=True, eq=False)
class Replacement:
    """Nodes that one call takes the place of.

    Attributes
    ----------
    members : frozenset[Node]
        The nodes.
    callee : tvm.ir.GlobalVar
        A TIR function of the module: it takes `Flow.inputs` of them, and makes `Flow.outputs`.
    """

    members: frozenset[Node]
    callee: Any


def merged(mod: Any, flow: Flow, members: Iterable[Node], name: str = "merged") -> Any:
    """Make one function of several calls, as TVM's ``FuseTIR`` does of what ``FuseOps`` groups.

    Parameters
    ----------
    mod : tvm.IRModule
        The module of the block.
    flow : Flow
        The block.
    members : Iterable[Node]
        Calls of TIR functions, and elements of their tuples.
    name : str
        Of the function.

    Returns
    -------
    tvm.tirx.PrimFunc
        With the blocks of all of them. Its parameters are `Flow.inputs`, then `Flow.outputs`;
        `Flow.numbers` are written where they are read.
    """
    nodes = sorted(members, key=lambda each: each.place)
    numbers, outputs = flow.numbers(nodes), flow.outputs(nodes)
    inputs = (*flow.inputs(nodes), *numbers)
    callees = {each.binding.value.args[0]: each.func for each in nodes if each.func is not None}
    builder = relax.BlockBuilder(tvm.IRModule(callees))
    params = [relax.Var(f"p{place}", each.ty) for place, each in enumerate(inputs)]
    image: dict[Any, Any] = dict(zip(inputs, params, strict=True))
    with builder.function(name, params, attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            for node in nodes:
                image[node.var] = builder.emit(_moved(node.binding.value, image))
            made = [builder.emit_output(image[each.var]) for each in outputs]
        builder.emit_func_output(made[0] if len(made) == 1 else relax.Tuple(made))
    region = builder.get().get_global_var(name)
    outer = [relax.Var(each.name, each.ty) for each in params]
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(Call(region, outer))
        builder.emit_func_output(result)
    fused = relax.transform.FuseTIR()(builder.get())
    (func,) = (each for each in fused.functions.values() if isinstance(each, ir.PrimFunc))
    return _with_numbers(func, len(inputs) - len(numbers), numbers)


def likeness(flow: Flow, members: Iterable[Node]) -> tuple[Any, ...]:
    """What `merged` makes of several calls, but for names: equal of the calls of equal layers.

    Parameters
    ----------
    flow : Flow
        The block.
    members : Iterable[Node]
        Calls of TIR functions, and elements of their tuples.

    Returns
    -------
    tuple
        To be compared within a flow: what is called, and where each argument comes from.
    """
    nodes = sorted(members, key=lambda each: each.place)
    names: dict[Any, Any] = {var: -1 - at for at, var in enumerate(flow.inputs(nodes))}
    names |= {each: (str(each.ty), each.value.numpy().tobytes()) for each in flow.numbers(nodes)}
    names |= {each.var: at for at, each in enumerate(nodes)}
    calls = tuple(
        (
            each.callee if each.callee is not None else int(each.binding.value.index),
            tuple(names[var] for var in each.reads),
        )
        for each in nodes
    )
    return calls, tuple(names[each.var] for each in flow.outputs(nodes))


def _with_numbers(func: Any, first: int, numbers: Sequence[Any]) -> Any:
    """Write constants in the place of parameters, from a first one on.

    A mask is one only if what it puts in the place of elements is known.
    """
    params = list(func.params)
    taken = params[first : first + len(numbers)]
    values = {
        buffer: ir.tirx.const(number.value.numpy().reshape(()).item(), str(buffer.ty.dtype))
        for buffer, number in zip(taken, numbers, strict=True)
    }

    def written(load: Any, mutator: Any) -> Any:
        return values[load.source] if load.source in values else mutator.default_mutate(load)

    def unread(block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        return ir.block_like(block, reads=[e for e in block.reads if e.source not in values])

    if not numbers:
        return func
    body = ir.mutate(func.body, (ir.TensorLoad, written), (ir.SBlock, unread))
    kept = [each for each in params if each not in values]
    return ir.PrimFunc(kept, body, func.ret_type, func.attrs)


def _moved(value: Any, image: Mapping[Any, Any]) -> Any:
    """A call of other variables, or an element of another tuple."""
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(image[value.tuple_value], value.index)
    callee, given = value.args
    moved = relax.Tuple([image.get(each, each) for each in given.fields])
    return Call(value.op, [callee, moved], value.attrs, value.ty_args)


def replaced(flow: Flow, replacements: Sequence[Replacement]) -> Any:
    """Make a dataflow block in which one call stands for each set of nodes.

    Parameters
    ----------
    flow : Flow
        The block.
    replacements : Sequence[Replacement]
        Sets without common nodes, so that no two of them need results of each other.

    Returns
    -------
    tvm.relax.DataflowBlock
        It binds the variables that were there and are still used, in an order in which all is made
        before it is read.
    """
    units: dict[Node, frozenset[Node]] = {each: frozenset([each]) for each in flow.nodes}
    callees: dict[frozenset[Node], Any] = {}
    for each in replacements:
        units |= dict.fromkeys(each.members, each.members)
        callees[each.members] = each.callee
    bindings: list[Any] = []
    for unit in _ordered(flow, units):
        if unit in callees:
            bindings += _call(flow, unit, callees[unit])
        else:
            bindings += [each.binding for each in unit]
    return relax.DataflowBlock(bindings)


def _ordered(flow: Flow, units: Mapping[Node, frozenset[Node]]) -> list[frozenset[Node]]:
    """Units after those that they read; of two that do not matter the one that ends first."""
    waiting: dict[frozenset[Node], set[frozenset[Node]]] = {}
    for node, unit in units.items():
        needed = waiting.setdefault(unit, set())
        needed |= {units[each] for each in flow.sources(node)} - {unit}
    readers: dict[frozenset[Node], list[frozenset[Node]]] = {}
    for unit, needed in waiting.items():
        for each in needed:
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
    assert len(found) == len(waiting)  # sets that need results of each other are never merged
    return found


def _call(flow: Flow, members: frozenset[Node], callee: Any) -> list[Any]:
    """Bindings of a call, and of the elements of its tuple."""
    outputs = flow.outputs(members)
    kinds = [each.var.ty for each in outputs]
    given = relax.Tuple(list(flow.inputs(members)))
    call = relax.call_tir(callee, given, out_ty=kinds[0] if len(kinds) == 1 else kinds)
    if len(outputs) == 1:
        return [relax.VarBinding(outputs[0].var, call)]
    whole = relax.DataflowVar(f"{callee.name_hint}_results", relax.TupleType(kinds))
    elements = [
        relax.VarBinding(each.var, relax.TupleGetItem(whole, place))
        for place, each in enumerate(outputs)
    ]
    return [relax.VarBinding(whole, call), *elements]
