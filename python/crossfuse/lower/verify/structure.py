"""Checks of a function as it was scheduled, before any pass renames or moves its loops."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import children, coordinate, evaluated
from crossfuse.markers import AXES, NAIVE_TAGS, cluster_axis, thread_tag


def check_structure(func: Any) -> None:
    """Loops are bound to clusters by `cluster_bind`, and no block uses two of a thread.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A scheduled function.

    Raises
    ------
    LoweringRefused
        Naming the user's loop.
    """
    _visit(func.body, ())


def _visit(node: Any, bound: tuple[Any, ...]) -> None:
    if isinstance(node, ir.For) and coordinate(node):
        _check_mark(node)
        _check_twice(node, [each for each in bound if coordinate(each) == coordinate(node)])
        bound = (*bound, node)
    elif isinstance(node, ir.SBlockRealize):
        _check_diagonal(node, bound)
    for child in children(node):
        _visit(child, bound)


def _check_mark(loop: Any) -> None:
    tag, axis = thread_tag(loop), cluster_axis(loop)
    if tag in NAIVE_TAGS:
        raise refuse(
            "cluster-binding",
            f"loop '{loop.loop_var.name}'",
            found=f"a plain bind to {tag}",
            limit="TVM launches too few CTAs for it and gives each the shared tiles of all",
            instead=f'call sch.cluster_bind(loop, axis="{tag[-1]}") instead of '
            f'sch.bind(loop, "{tag}")',
        )
    if axis is not None and axis not in AXES:
        raise refuse(
            "cluster-binding",
            f"loop '{loop.loop_var.name}'",
            found=f"the annotation of an axis '{axis}'",
            limit=f"axes {', '.join(AXES)}",
            instead='call sch.cluster_bind(loop, axis="x") instead of sch.annotate',
        )


def _check_twice(loop: Any, around: list[Any]) -> None:
    """Threads may go through a loop inside their own again, to load together; CTAs may not."""
    for outer in around:
        extents = ir.constant(outer.extent), ir.constant(loop.extent)
        if cluster_axis(loop) is not None:
            raise _refuse_twice(loop, outer, "")
        if extents[0] != extents[1]:
            raise _refuse_twice(loop, outer, f", with extents {extents[0]} and {extents[1]}")


def _check_diagonal(realize: Any, bound: tuple[Any, ...]) -> None:
    """A block that uses two loops of one coordinate would run only where both are equal."""
    used = {var for each in evaluated(realize) for var in ir.variables(each)}
    seen: dict[str, Any] = {}
    for loop in bound:
        if loop.loop_var not in used or ir.constant(loop.extent) == 1:
            continue
        outer = seen.setdefault(coordinate(loop), loop)
        if not outer.same_as(loop):
            raise _refuse_twice(loop, outer, f", and block '{realize.block.name_hint}' uses both")


def _refuse_twice(loop: Any, outer: Any, why: str) -> Exception:
    axis = cluster_axis(loop)
    place = coordinate(loop) if axis is None else f"cluster axis {axis}"
    return refuse(
        "thread-binding" if axis is None else "cluster-binding",
        f"loop '{loop.loop_var.name}'",
        found=f"loop '{outer.loop_var.name}' of {place} around it{why}",
        limit=f"one loop a nest on each {'coordinate' if axis is None else 'cluster axis'}",
        instead="bind one of them to another axis, or fuse the two and bind that",
    )
