"""Facts about blocks and loops of a schedule: read only, no primitive is called here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.markers import cluster_axis

#: The combining operators of `dsm_reduce`, by the TVM node of their update expression.
COMBINERS = {ir.tirx.Add: "sum", ir.tirx.Mul: "product", ir.tirx.Max: "max", ir.tirx.Min: "min"}


@dataclass(frozen=True)
class ClusterLoop:
    """A loop bound by `cluster_bind`.

    Attributes
    ----------
    axis : str
        Cluster axis, "x", "y" or "z".
    name : str
        Name of the loop variable.
    extent : int
        CTAs along the axis.
    """

    axis: str
    name: str
    extent: int


def function(sch: Any) -> Any:
    """The PrimFunc that a schedule works on."""
    if sch.func_working_on is not None:
        return sch.mod[sch.func_working_on]
    (only,) = sch.mod.functions.values()
    return only


def cluster_loops(func: Any) -> tuple[ClusterLoop, ...]:
    """All cluster-bound loops of a function, in no particular order."""
    found: list[ClusterLoop] = []

    def visit(loop: Any) -> None:
        axis = cluster_axis(loop)
        if axis is not None:
            found.append(ClusterLoop(axis, str(loop.loop_var.name), int(loop.extent)))

    ir.walk(func.body, (ir.For, visit))
    return tuple(found)


def name_of(sch: Any, item: Any) -> str:
    """``block 'C'`` or ``loop 'k_0'``, as refusals name them."""
    node = sch.get(item)
    if isinstance(node, ir.SBlock):
        return f"block '{node.name_hint}'"
    return f"loop '{node.loop_var.name}'"


def position(sch: Any, rule: str, block: Any, loop: Any) -> tuple[list[Any], int]:
    """Loops of `block` and the index of `loop` among them.

    Raises
    ------
    ScheduleRefused
        If `loop` does not enclose `block`.
    """
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
    """Extent of a loop whose bounds are known.

    Raises
    ------
    ScheduleRefused
        If the extent is symbolic.
    """
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
    found: list[Any] = []
    target = sch.get(block)

    def visit(node: Any) -> None:
        if node.block.same_as(target):
            found.append(node)

    ir.walk(function(sch).body, (ir.SBlockRealize, visit))
    return found[0]


def bindings(sch: Any, block: Any) -> list[tuple[Any, Any]]:
    """Pairs (block iteration variable, expression of the loops that binds it)."""
    node = realize(sch, block)
    return list(zip(node.block.iter_vars, node.iter_values, strict=True))


def binds(loop_var: Any, expression: Any) -> bool:
    """Whether a loop variable occurs in a binding expression."""
    return any(var.same_as(loop_var) for var in ir.variables(expression))


def is_reduction(iter_var: Any) -> bool:
    """Whether a block iteration variable is a reduction axis."""
    return int(iter_var.iter_type) == int(ir.IterVar.CommReduce)


def span(expression: Any, inner: list[Any]) -> int:
    """Number of values an index takes while the `inner` loops run and all others stand still."""
    kept = [loop.loop_var for loop in inner]

    def still(var: Any) -> Any:
        return var if any(var.same_as(each) for each in kept) else ir.tirx.IntImm("int32", 0)

    analyzer = ir.sym.Analyzer()
    for loop in inner:
        analyzer.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    bound = analyzer.const_int_bound(ir.substitute(expression, still))
    return int(bound.max_value) - int(bound.min_value) + 1


def combiner(sch: Any, block: Any) -> str | None:
    """Operator of a reduction block: "sum", "product", "max", "min", or None."""
    node = sch.get(block)
    body = node.body
    if node.init is None or not isinstance(body, ir.BufferStore):
        return None
    return COMBINERS.get(type(body.value))


def reason(error: Exception) -> str:
    """The sentence of a schedule error, without the rendered program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error message:"):
            return line.removeprefix("Error message:").removeprefix(" ScheduleError:").strip()
    return lines[-1] if lines else type(error).__name__
