"""Reads the loops over places: clusters of the grid, and the CTAs of a cluster."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.program.tile_nest import check_start, refuse_program
from crossfuse.lower.tree import coordinate
from crossfuse.markers import STAGES

Loops = tuple[Any, ...]


def is_bound(node: Any) -> bool:
    """Whether a node is a loop over the CTAs of a cluster."""
    return isinstance(node, ir.For) and coordinate(node).startswith("cluster.")


def is_place(loop: Any) -> bool:
    """Whether a loop of constant extent counts clusters or the CTAs of one."""
    bound = coordinate(loop).startswith(("blockIdx.", "cluster."))
    return bound and ir.constant(loop.extent) is not None


def has_stages(loop: Any) -> bool:
    """Whether a loop runs as a pipeline."""
    return STAGES in loop.annotations


def places_of(loops: Loops) -> tuple[Place, ...]:
    """The coordinates that loops count, outermost first."""
    return tuple(Place(coordinate(each), each.loop_var, int(each.extent)) for each in loops)


def outer_loops(node: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Bound loops from the outside, and what stands inside them."""
    loops: list[Any] = []
    while isinstance(node, ir.For) and not has_stages(node):
        tag = coordinate(node)
        if not is_place(node):
            raise refuse_program(
                f"loop '{node.loop_var.name}'",
                f"a loop bound to {tag}" if tag else "a serial loop around the pipelined one",
                "loops of constant extent over the grid and the cluster",
            )
        check_start(node)
        loops.append(node)
        node = node.body
    return tuple(loops), list(node.seq) if isinstance(node, ir.SeqStmt) else [node]
