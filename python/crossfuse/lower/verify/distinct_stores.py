"""Parallel iterations must store to distinct elements.

Run sequentially, a thread that stores a stale value into another thread's element goes unseen:
the right value comes later. On the chip it is a race. So every store to memory that threads share
must be an injective map of the parallel loops around it.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.lower.stored_elements import stored_elements
from crossfuse.lower.tree import Access, analyzer, bounds, coordinate
from crossfuse.markers import DSM_SCOPE

_TRUE = ir.tirx.IntImm("bool", 1)


def check_distinct_stores(kernel: ClusterKernel) -> None:
    """No two threads store to one element by the same statement.

    Raises
    ------
    LoweringRefused
        If a store is not provably injective in the loops bound to CTAs and threads, or threads of
        the kernel execute it together because no loop around it is bound to them.
    """
    everywhere = _coordinates(kernel.body)
    for access in kernel.uses:
        if isinstance(access.site.node, ir.BufferStore) and access.write and access.indices:
            shared_by = _shared_by(kernel, access.buffer)
            if shared_by:
                _check_store(access, shared_by, everywhere)


def _check_store(access: Access, shared_by: tuple[str, ...], everywhere: dict[str, int]) -> None:
    fixed = _fixed(access.site.conditions)
    loops = [each for each in access.loops if not coordinate(each) or _is_in(each, shared_by)]
    parallel = [
        each
        for each in loops
        if coordinate(each) and ir.constant(each.extent) != 1 and each.loop_var not in fixed
    ]
    bound = {coordinate(each) for each in access.loops}
    for tag, extent in everywhere.items():
        if tag not in bound and extent != 1 and tag.startswith(shared_by):
            raise _refuse(access, f"a store that all {extent} places along {tag} execute")
    if not parallel:
        return
    known = analyzer(access.loops)
    written = [
        ir.substitute(index, lambda var: fixed.get(var, var)) for index in access.indices or ()
    ]
    indices = [known.simplify(index) for index in written]
    used = _variables(indices)
    for loop in parallel:
        if not any(var.same_as(loop.loop_var) for var in used):
            raise _refuse(access, f"a store that loop '{_name(loop)}' repeats")
    condition = known.simplify(ir.conjunction(access.site.conditions))
    serial = [each for each in loops if any(var.same_as(each.loop_var) for var in used)]
    serial = [each for each in serial if not any(each.same_as(one) for one in parallel)]
    if _injective(indices, _ranges(loops, indices), condition):
        return
    stored = stored_elements(indices, bounds(parallel), bounds(serial), [condition])
    if stored is None or stored.of_several_actors().size:
        raise _refuse(access, "parallel iterations that may store to one element")


def _coordinates(body: Any) -> dict[str, int]:
    """Coordinates that any loop of the kernel is bound to, with their extents."""
    found: dict[str, int] = {}

    def visit(loop: Any) -> None:
        if coordinate(loop):
            found[coordinate(loop)] = ir.constant(loop.extent) or 0

    ir.walk(body, (ir.For, visit))
    return found


def _shared_by(kernel: ClusterKernel, buffer: Any) -> tuple[str, ...]:
    """Coordinates (or their beginnings) over whose places memory of a buffer is shared."""
    scope = str(buffer.scope())
    if scope == "global":
        return ("blockIdx.", "cluster.", "threadIdx.")
    if scope == DSM_SCOPE:
        return (f"cluster.{kernel.buffers[buffer]}", "threadIdx.")
    return ("threadIdx.",) if scope.startswith("shared") else ()


def _is_in(loop: Any, shared_by: tuple[str, ...]) -> bool:
    return coordinate(loop).startswith(shared_by)


def _fixed(conditions: tuple[Any, ...]) -> dict[Any, Any]:
    """Variables that a condition pins to one value, such as ``threadIdx.x == 0``."""
    found: dict[Any, Any] = {}
    for condition in conditions:
        for term in ir.terms(condition):
            if not isinstance(term, ir.tirx.EQ) or not isinstance(term.a, ir.Var):
                continue
            if ir.constant(term.b) is not None:
                found[term.a] = term.b
    return found


def _variables(indices: list[Any]) -> list[Any]:
    return [var for index in indices for var in ir.variables(index)]


def _ranges(loops: list[Any], indices: list[Any]) -> dict[Any, Any]:
    """Ranges of the loops that occur in the indices."""
    used = _variables(indices)
    return {
        loop.loop_var: ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent)
        for loop in loops
        if any(var.same_as(loop.loop_var) for var in used)
    }


def _injective(indices: list[Any], ranges: dict[Any, Any], predicate: Any) -> bool:
    # Injective without the predicate is injective with it; some maps need it to be affine.
    return _is_spread(indices, ranges) or any(
        len(_detect(indices, ranges, each).indices) > 0 for each in (_TRUE, predicate)
    )


def _is_spread(indices: list[Any], ranges: dict[Any, Any]) -> bool:
    """Whether each variable steps over all that smaller steps reach, in one dimension or another.

    Then different values give different places, also where places between are left out.
    """
    variables = list(ranges)
    if any(ir.constant(each.extent) is None for each in ranges.values()):
        return False
    left = dict(ranges)
    for index in indices:
        terms = ir.sym.detect_linear_equation(index, variables)
        steps = [abs(ir.constant(each) or 0) for each in terms[:-1]] if terms else []
        found = [(step, var) for step, var in zip(steps, variables, strict=False) if step]
        reached = 0
        for step, var in sorted(found, key=lambda pair: pair[0]):
            if step <= reached:
                break
            reached += step * (int(ir.constant(ranges[var].extent) or 0) - 1)
        else:
            for _, var in found:
                left.pop(var, None)
    return not left


def _detect(indices: list[Any], ranges: dict[Any, Any], predicate: Any) -> Any:
    return ir.sym.detect_iter_map(indices, ranges, predicate, check_level="bijective")


def _name(loop: Any) -> str:
    tag = coordinate(loop)
    return str(loop.loop_var.name) if tag.startswith("cluster.") else tag


def _refuse(access: Access, found: str) -> Exception:
    return refuse(
        "distinct-stores",
        f"buffer '{access.buffer.name}'",
        found=f"{found}: {access.site.text}",
        limit="one thread stores each element",
        instead="bind the loops of the storing block to the threads with factors that divide its "
        "tile, so that no thread is left over",
    )
