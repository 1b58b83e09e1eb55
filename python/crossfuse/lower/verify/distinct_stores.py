"""Parallel iterations must store to distinct elements.

Run sequentially, a thread that stores a stale value into another thread's element goes unseen:
the right value comes later. On the chip it is a race. So every store to memory that threads share
must be an injective map of the parallel loops around it.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.lower.kernel import ClusterKernel, children
from crossfuse.schedule.markers import DSM_SCOPE, cluster_axis, thread_tag

_TRUE = ir.tirx.IntImm("bool", 1)


def check_distinct_stores(kernel: ClusterKernel) -> None:
    """No two threads of the grid store to one element by the same statement.

    Raises
    ------
    LoweringRefused
        If a store is not provably injective in the loops bound to CTAs and threads.
    """
    _visit(kernel.body, (), ())


def _visit(node: Any, loops: tuple[Any, ...], conditions: tuple[Any, ...]) -> None:
    if isinstance(node, ir.BufferStore):
        _check_store(node, loops, conditions)
        return
    if isinstance(node, ir.SBlockRealize):
        conditions = (*conditions, node.predicate)
    if isinstance(node, ir.IfThenElse):
        _visit(node.then_case, loops, (*conditions, node.condition))
        if node.else_case is not None:
            _visit(node.else_case, loops, conditions)
        return
    for child, around in children(node):
        _visit(child, loops + around, conditions)


def _check_store(store: Any, loops: tuple[Any, ...], conditions: tuple[Any, ...]) -> None:
    shared_by = _shared_by(store.buffer.scope())
    if not shared_by:
        return
    fixed = _fixed(conditions)
    parallel = [
        loop
        for loop in loops
        if _is_parallel(loop, shared_by)
        and ir.constant(loop.extent) != 1
        and loop.loop_var not in fixed
    ]
    if not parallel:
        return
    analyzer = ir.sym.Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    indices = [
        analyzer.simplify(ir.substitute(index, lambda var: fixed.get(var, var)))
        for index in store.indices
    ]
    used = [var for index in indices for var in ir.variables(index)]
    for loop in parallel:
        if not any(var.same_as(loop.loop_var) for var in used):
            raise _refuse(store, f"loop '{_name(loop)}' repeats the store for every iteration")
    predicate = _TRUE
    for condition in conditions:
        predicate = ir.tirx.And(predicate, condition)
    if not _injective(indices, loops, used, analyzer.simplify(predicate)):
        raise _refuse(store, "parallel iterations that may store to one element")


def _shared_by(scope: str) -> tuple[str, ...]:
    """Thread tags (and "cluster") over which memory of a scope is shared."""
    if scope == "global":
        return ("blockIdx", "cluster", "threadIdx")
    if scope == DSM_SCOPE:
        return ("cluster", "threadIdx")
    return ("threadIdx",) if scope.startswith("shared") else ()


def _is_parallel(loop: Any, shared_by: tuple[str, ...]) -> bool:
    if cluster_axis(loop) is not None:
        return "cluster" in shared_by
    tag = thread_tag(loop)
    return any(tag.startswith(each) for each in shared_by)


def _fixed(conditions: tuple[Any, ...]) -> dict[Any, Any]:
    """Variables that a condition pins to one value, such as ``threadIdx.x == 0``."""
    found: dict[Any, Any] = {}
    for condition in conditions:
        for term in _terms(condition):
            if not isinstance(term, ir.tirx.EQ) or not isinstance(term.a, ir.Var):
                continue
            if ir.constant(term.b) is not None:
                found[term.a] = term.b
    return found


def _terms(condition: Any) -> list[Any]:
    if isinstance(condition, ir.tirx.And):
        return _terms(condition.a) + _terms(condition.b)
    return [condition]


def _injective(indices: list[Any], loops: tuple[Any, ...], used: list[Any], predicate: Any) -> bool:
    ranges = {
        loop.loop_var: ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent)
        for loop in loops
        if any(var.same_as(loop.loop_var) for var in used)
    }
    # Injective without the predicate is injective with it; some maps need it to be affine.
    return any(len(_detect(indices, ranges, each).indices) > 0 for each in (_TRUE, predicate))


def _detect(indices: list[Any], ranges: dict[Any, Any], predicate: Any) -> Any:
    return ir.sym.detect_iter_map(indices, ranges, predicate, check_level="bijective")


def _name(loop: Any) -> str:
    return thread_tag(loop) or str(loop.loop_var.name)


def _refuse(store: Any, found: str) -> Exception:
    text = str(store.script()).strip().splitlines()[-1].strip()
    return refuse(
        LoweringRefused,
        "distinct-stores",
        f"buffer '{store.buffer.name}'",
        found=f"{found}: {text}",
        limit="one thread stores each element",
        instead="bind the loops of the storing block to the threads with factors that divide its "
        "tile, so that no thread is left over",
    )
