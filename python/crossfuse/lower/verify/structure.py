"""Checks of a function as it was scheduled, before any pass renames or moves its loops."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import children
from crossfuse.schedule.markers import AXES, NAIVE_TAGS, cluster_axis, thread_tag


def check_structure(func: Any) -> None:
    """Loops are bound to clusters by `cluster_bind`, each axis once in a nest.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A scheduled function.

    Raises
    ------
    LoweringRefused
        Naming the user's loop.
    """
    _visit(func.body, {})


def _visit(node: Any, bound: dict[str, Any]) -> None:
    if isinstance(node, ir.For):
        tag, axis = thread_tag(node), cluster_axis(node)
        if tag in NAIVE_TAGS:
            raise refuse(
                "cluster-binding",
                f"loop '{node.loop_var.name}'",
                found=f"a plain bind to {tag}",
                limit="TVM launches too few CTAs for it and gives each the shared tiles of all",
                instead=f'call sch.cluster_bind(loop, axis="{tag[-1]}") instead of '
                f'sch.bind(loop, "{tag}")',
            )
        if axis is not None:
            if axis not in AXES:
                raise refuse(
                    "cluster-binding",
                    f"loop '{node.loop_var.name}'",
                    found=f"the annotation of an axis '{axis}'",
                    limit=f"axes {', '.join(AXES)}",
                    instead='call sch.cluster_bind(loop, axis="x") instead of sch.annotate',
                )
            if axis in bound:
                raise refuse(
                    "cluster-binding",
                    f"loop '{node.loop_var.name}'",
                    found=f"loop '{bound[axis].loop_var.name}' of cluster axis {axis} around it",
                    limit="one loop a nest on each cluster axis",
                    instead="bind one of them to another axis, or fuse the two and bind that",
                )
            bound = bound | {axis: node}
    for child in children(node):
        _visit(child, bound)
