"""Slices that a cluster passes in ring order, as if all of them were copied before the products.

Each CTA has room for all slices, so a ring is no more than an order: slices are multiplied as they
arrive, the CTA's own one first.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile_nest import check_start, refuse_program
from crossfuse.lower.hopper.recover.places import has_stages


def is_ring(node: Any) -> bool:
    """Whether a node is a serial loop of a copy, and of what is done with what it copies."""
    return isinstance(node, ir.For) and not has_stages(node) and isinstance(node.body, ir.SeqStmt)


def all_at_once(ring: Any) -> list[Any]:
    """Divide the loop over slices: a nest that copies all of them, then loops over all steps.

    ::

        before                                 after
        for r in range(4):                     for r in range(4):
            whole[r] = hidden[r]                   whole[r] = hidden[r]
            for k0 in range(2):                for s in range(8):
                ... whole[r][k0] ...               ... whole[s // 2][s % 2] ...

    Raises
    ------
    LoweringRefused
        If the loop is no plain one, or anything but loops with stages follows the copy.
    """
    where = f"loop '{ring.loop_var.name}'"
    copy, *loops = ring.body.seq
    check_start(ring)
    plain = int(ring.kind) == int(ir.ForKind.SERIAL) and ir.constant(ring.extent) is not None
    if not plain or not loops or not all(map(_is_pipeline, loops)):
        raise refuse_program(
            where,
            f"{len(loops)} statements behind the copy of a slice, in {ring.extent} turns",
            "a constant number of slices, each copied and then multiplied by loops with stages",
        )
    return [ir.for_like(ring, copy), *(_joined(ring, each) for each in loops)]


def _is_pipeline(node: Any) -> bool:
    return isinstance(node, ir.For) and has_stages(node) and ir.constant(node.extent) is not None


def _joined(ring: Any, loop: Any) -> Any:
    """The steps of all slices, in one loop."""
    steps = int(loop.extent)
    step = ir.Var(str(loop.loop_var.name), str(loop.loop_var.ty))
    values = {
        ring.loop_var: ir.tirx.floordiv(step, steps),
        loop.loop_var: ir.tirx.floormod(step, steps),
    }
    body = ir.substitute(loop.body, lambda var: values.get(var, var))
    return ir.for_like(loop, body, loop_var=step, extent=int(ring.extent) * steps)
