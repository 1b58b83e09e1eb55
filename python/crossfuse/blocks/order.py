"""Loops in the order of what a block stores, whatever order they were written in."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import is_reduction


def in_output_order(func: Any) -> Any:
    """A function whose blocks loop over what they store, then over what they reduce.

    Rules divide the loops of a product as rows, columns and what is summed. Only nests of plain
    loops around one block are reordered, whose loops are the block's variables one by one, and the
    indices of its output some of these. The function itself is returned if all are in order.
    """
    changed: list[Any] = []

    def nest(loop: Any, mutator: Any) -> Any:
        loops, inside = [loop], loop.body
        while isinstance(inside, ir.For):
            loops.append(inside)
            inside = inside.body
        order = _order(loops, inside) if isinstance(inside, ir.SBlockRealize) else None
        if order is None:
            return mutator.default_mutate(loop)
        around = {each.loop_var: each for each in loops}
        wanted = [around[inside.iter_values[each]] for each in order]
        in_order = all(a.same_as(b) for a, b in zip(wanted, loops, strict=True))
        if in_order and order == sorted(order):
            return loop
        changed.append(inside)
        block = inside.block
        variables = [block.iter_vars[each] for each in order]
        values = [inside.iter_values[each] for each in order]
        made: Any = ir.block_like(block, iter_vars=variables)
        made = ir.SBlockRealize(values, inside.predicate, made)
        for each in reversed(wanted):
            made = ir.for_like(each, made)
        return made

    body = ir.mutate(func.body, (ir.For, nest))
    return ir.with_body(func, body) if changed else func


def _order(loops: list[Any], realize: Any) -> list[int] | None:
    """The order of a block's variables by its output; None if they are not its loops one by one."""
    block, values = realize.block, list(realize.iter_values)
    plain = all(_is_plain(each) for each in loops) and isinstance(block.body, ir.BufferStore)
    vars_of_loops = {each.loop_var for each in loops}
    if not plain or len(values) != len(loops) or vars_of_loops != set(values):
        return None
    places = {each.var: at for at, each in enumerate(block.iter_vars)}
    stored = [places[each] for each in block.body.indices if each in places]
    summed = [at for at, each in enumerate(block.iter_vars) if is_reduction(each)]
    order = [*stored, *summed]
    return order if sorted(order) == list(range(len(places))) else None


def _is_plain(loop: Any) -> bool:
    serial = int(loop.kind) == int(ir.ForKind.SERIAL)
    return serial and not loop.annotations and loop.thread_binding is None
