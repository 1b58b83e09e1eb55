"""Buffers that each CTA has for itself must not carry values from one rank to another."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.lower.kernel import ClusterKernel, children, statements
from crossfuse.schedule.markers import DSM_SCOPE, cluster_axis


def check_private_buffers(kernel: ClusterKernel) -> None:
    """A buffer written under one cluster-bound loop is used under that loop only.

    Sequentially there is one such buffer; on the chip every CTA has its own, and a value written
    by rank 0 does not appear in the copy of rank 1.

    Raises
    ------
    LoweringRefused
        Naming the buffer and the two loops.
    """
    if kernel.size == 1:
        return
    allocated = _allocations(kernel.body)
    users: dict[Any, list[tuple[bool, Any, str]]] = {}
    for statement, loops in statements(kernel.body):
        nest = next((loop for loop in loops if cluster_axis(loop) is not None), None)
        touched = [(var, False) for var in ir.variables(statement) if var in allocated]
        if isinstance(statement, ir.BufferStore) and statement.buffer in allocated:
            touched.append((statement.buffer, True))
        for buffer, write in touched:
            users.setdefault(buffer, []).append((write, nest, str(buffer.scope())))
    for buffer, uses in users.items():
        _check(buffer, uses)


def _allocations(body: Any) -> set[Any]:
    """Private buffers allocated outside every cluster-bound loop."""
    found: set[Any] = set()

    def visit(node: Any) -> None:
        if isinstance(node, ir.For) and cluster_axis(node) is not None:
            return
        if isinstance(node, ir.SBlock):
            for buffer in node.alloc_buffers:
                if buffer.scope() not in (DSM_SCOPE, "global"):
                    found.add(buffer)
        for child, _ in children(node):
            visit(child)

    visit(body)
    return found


def _check(buffer: Any, uses: list[tuple[bool, Any, str]]) -> None:
    writer = next((nest for write, nest, _ in uses if write and nest is not None), None)
    if writer is None:
        return
    for _, nest, scope in uses:
        if nest is None or not nest.loop_var.same_as(writer.loop_var):
            where = "outside it" if nest is None else f"under loop '{nest.loop_var.name}'"
            raise refuse(
                LoweringRefused,
                "private-buffer",
                f"buffer '{buffer.name}'",
                found=f"a {scope} buffer written under cluster-bound loop "
                f"'{writer.loop_var.name}' and used {where}",
                limit="each CTA of a cluster has a copy of its own",
                instead="compute it at the cluster-bound loop that uses it, or exchange it with "
                "dsm_reduce or dsm_shuffle",
            )
