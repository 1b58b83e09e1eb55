"""A schedule as a person would sketch it: loops with what they are bound to, blocks by name."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.extract import only_function
from crossfuse.markers import cluster_axis, thread_tag


def sketch(schedule: Any) -> str:
    """Draw the loop nest of a scheduled function, one line for each loop or block.

    Consecutive serial loops share a line. A block's line names what it writes and reads.
    """
    lines: list[str] = []
    _draw(only_function(schedule).body.block.body, 0, lines)
    return "\n".join(lines)


def _draw(node: Any, depth: int, lines: list[str]) -> None:
    if isinstance(node, ir.SeqStmt):
        for each in node.seq:
            _draw(each, depth, lines)
    elif isinstance(node, ir.For):
        _loop(node, depth, lines)
    elif isinstance(node, ir.SBlockRealize):
        lines.append("  " * depth + _block(node.block))


def _loop(loop: Any, depth: int, lines: list[str]) -> None:
    serial: list[str] = []
    while isinstance(loop, ir.For) and not _binding(loop):
        if ir.constant(loop.extent) != 1:
            serial.append(f"{loop.loop_var.name} < {loop.extent}")
        loop = loop.body
    if serial:
        lines.append("  " * depth + f"for {', '.join(serial)}")
    inside = depth + bool(serial)
    if isinstance(loop, ir.For):
        lines.append("  " * inside + f"for {loop.loop_var.name} < {loop.extent}: {_binding(loop)}")
        _draw(loop.body, inside + 1, lines)
    else:
        _draw(loop, inside, lines)


def _binding(loop: Any) -> str:
    """The binding of a loop; empty for a serial one."""
    axis = cluster_axis(loop)
    if axis is not None:
        return f"CTAs of the cluster, axis {axis}"
    kind = int(loop.kind)
    special = {int(ir.ForKind.VECTORIZED): "vector", int(ir.ForKind.UNROLLED): "unrolled"}
    return thread_tag(loop) or special.get(kind, "")


def _block(block: Any) -> str:
    reads = dict.fromkeys(str(each.source.name) for each in block.reads)
    writes = dict.fromkeys(str(each.source.name) for each in block.writes)
    sources = ", ".join(name for name in reads if name not in writes)
    return (
        f"{', '.join(writes)} <- {sources}" if sources else f"{', '.join(writes)} <- initial value"
    )
