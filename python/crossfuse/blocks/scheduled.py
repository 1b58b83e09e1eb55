"""Facts about blocks and loops, of a schedule or a function: no primitive is called here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import cluster_axis


@dataclass(frozen=True)
class ClusterLoop:
    """A loop bound by `cluster_bind`: axis "x", "y" or "z" of the cluster, and CTAs along it."""

    axis: str
    name: str
    extent: int


def function(sch: Any, item: Any = None) -> Any:
    """The PrimFunc that a schedule works on, or the one that holds a block or loop.

    A module of several functions raises `ScheduleRefused` if nothing says which is meant.
    """
    if item is not None:
        return _function_of(sch, item)
    if sch.func_working_on is not None:
        return sch.mod[sch.func_working_on]
    functions = [each for each in sch.mod.functions.values() if isinstance(each, ir.PrimFunc)]
    if len(functions) != 1:
        names = ", ".join(sorted(str(each.name_hint) for each in sch.mod.functions))
        raise refuse(
            ScheduleRefused,
            "schedule",
            "module",
            found=f"{len(functions)} functions ({names})",
            limit="one PrimFunc, or one that is worked on",
            instead="call sch.work_on(name) first",
        )
    return functions[0]


def _function_of(sch: Any, item: Any) -> Any:
    sref = sch.get_sref(item)
    while sref.parent is not None:
        sref = sref.parent
    root = sref.stmt
    return next(
        each
        for each in sch.mod.functions.values()
        if isinstance(each, ir.PrimFunc) and each.body.block.same_as(root)
    )


def cluster_loops(func: Any) -> tuple[ClusterLoop, ...]:
    """All cluster-bound loops of a function, in no particular order."""
    return tuple(
        ClusterLoop(axis, str(loop.loop_var.name), ir.constant(loop.extent) or 0)
        for loop in ir.nodes(func.body, ir.For)
        if (axis := cluster_axis(loop)) is not None
    )


def name_of(sch: Any, item: Any) -> str:
    """``block 'C'`` or ``loop 'k_0'``, as refusals name them."""
    node = sch.get(item)
    if isinstance(node, ir.SBlock):
        return f"block '{node.name_hint}'"
    return f"loop '{node.loop_var.name}'"


def position(sch: Any, rule: str, block: Any, loop: Any) -> tuple[list[Any], int]:
    """Loops of `block`, and the index of `loop` among them; `ScheduleRefused` if it is none."""
    loops = list(sch.get_loops(block))
    target = sch.get_sref(loop)
    for index, candidate in enumerate(loops):
        if sch.get_sref(candidate).same_as(target):
            return loops, index
    names = ", ".join(str(sch.get(each).loop_var.name) for each in loops)
    raise refuse(
        ScheduleRefused,
        rule,
        f"{name_of(sch, block)}, {name_of(sch, loop)}",
        found="a loop that does not enclose the block",
        limit=f"one of the block's own loops ({names})",
        instead="take the loop from sch.get_loops(block)",
    )


def constant_extent(sch: Any, rule: str, loop: Any) -> int:
    """Extent of a loop; `ScheduleRefused` if it is symbolic."""
    node = sch.get(loop)
    extent = ir.constant(node.extent)
    if extent is None:
        raise refuse(
            ScheduleRefused,
            rule,
            name_of(sch, loop),
            found=f"extent {node.extent}",
            limit="a constant extent",
            instead="split the loop by a constant factor first",
        )
    return extent


def realize(sch: Any, block: Any) -> Any:
    """The SBlockRealize of a block: its iteration bindings and predicate."""
    target = sch.get(block)
    every = ir.nodes(function(sch, block).body, ir.SBlockRealize)
    return next(each for each in every if each.block.same_as(target))


def bindings(sch: Any, block: Any) -> list[tuple[Any, Any]]:
    """Pairs (block iteration variable, expression of the loops that binds it)."""
    node = realize(sch, block)
    return list(zip(node.block.iter_vars, node.iter_values, strict=True))


def in_loops(sch: Any, block: Any, expression: Any) -> Any:
    """Rewrite an expression of a block's iteration variables in terms of its loops."""
    values = bindings(sch, block)

    def bound(var: Any) -> Any:
        return next((value for each, value in values if each.var.same_as(var)), var)

    return ir.substitute(expression, bound)


def binds(loop_var: Any, expression: Any) -> bool:
    """Whether a loop variable occurs in a binding expression."""
    return any(var.same_as(loop_var) for var in ir.variables(expression))


def span(expression: Any, inner: list[Any]) -> int:
    """Number of values an index takes while the `inner` loops run and all others stand still."""
    kept = [loop.loop_var for loop in inner]

    def still(var: Any) -> Any:
        return var if any(var.same_as(each) for each in kept) else ir.tirx.IntImm(var.ty.dtype, 0)

    bound = analyzer(inner).const_int_bound(ir.substitute(expression, still))
    return int(bound.max_value) - int(bound.min_value) + 1


def analyzer(loops: Iterable[Any]) -> Any:
    """An analyzer that knows the ranges of ``For`` loops."""
    known = ir.sym.Analyzer()
    for loop in loops:
        known.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    return known


def combiner(sch: Any, block: Any) -> str | None:
    """Operator of a reduction block: "sum", "product", "max", "min", or None."""
    return combiner_of(sch.get(block))


def read_of(sch: Any, consumer: Any, producer: Any) -> int:
    """Index of the read, among a block's, that another block writes."""
    written = sch.get(producer).writes[0].source
    reads = sch.get(consumer).reads
    return next(i for i, each in enumerate(reads) if each.source.same_as(written))


def reduces(sch: Any, block: Any) -> bool:
    """Whether a block is a reduction, possibly of a sum that it rescales on its way."""
    node = sch.get(block)
    return combiner_of(node) is not None or corrected(node.body) is not None


def written_buffer(sch: Any, block: Any) -> Any:
    """The buffer that a block writes (its first, if it writes several)."""
    return sch.get(block).writes[0].source


def read_index(sch: Any, block: Any, buffer: Any) -> int:
    """Index of the read, among a block's, that is `buffer`."""
    reads = sch.get(block).reads
    return next(i for i, each in enumerate(reads) if each.source.same_as(buffer))


# Facts about one block of a function, for the stages that read blocks.

#: Combining operators of reductions, by the TVM node of their update expression.
COMBINERS = {ir.tirx.Add: "sum", ir.tirx.Mul: "product", ir.tirx.Max: "max", ir.tirx.Min: "min"}


def is_reduction(iter_var: Any) -> bool:
    """Whether a block iteration variable is a reduction axis."""
    return int(iter_var.iter_type) == int(ir.IterVar.CommReduce)


def combiner_of(block: Any) -> str | None:
    """Operator of a reduction block: "sum", "product", "max", "min", or None."""
    body = block.body
    if block.init is None or not isinstance(body, ir.BufferStore):
        return None
    operator = COMBINERS.get(type(body.value))
    return operator if operator is not None and carried(body) is not None else None


def iterations(func: Any) -> int:
    """How often blocks of an unscheduled function run, all of them together."""
    return sum(map(_runs, ir.nodes(func.body, ir.SBlock)))


def _runs(block: Any) -> int:
    return prod(int(each.dom.extent) for each in block.iter_vars)


def carried(store: Any) -> Any:
    """The operand of an update that is the element being updated, or None."""
    for each in (store.value.a, store.value.b):
        if isinstance(each, ir.TensorLoad) and each.source.same_as(store.buffer):
            return each
    return None


def corrected(store: Any) -> tuple[Any, Any] | None:
    """The element being updated and its factor, of ``c = c * factor + term``; else None."""
    if not isinstance(store, ir.BufferStore) or not isinstance(store.value, ir.tirx.Add):
        return None
    if not isinstance(store.value.a, ir.tirx.Mul):
        return None
    sums, factor = store.value.a.a, store.value.a.b
    own = isinstance(sums, ir.TensorLoad) and sums.source.same_as(store.buffer)
    return (sums, factor) if own else None
