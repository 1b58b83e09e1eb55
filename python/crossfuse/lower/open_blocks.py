"""Dissolves blocks that hold other blocks: their statements take their place.

A schedule binds loops around a block that holds a whole nest, because then it need not look into
the nest. Lowerings that read a nest statement by statement read it without that block.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


def open_blocks(func: Any) -> Any:
    """Dissolve all blocks that hold other blocks, except the root.

    Buffers of dissolved blocks move to the root; their variables are replaced by their values.
    Blocks with conditions or initial values stay.
    """
    root = func.body.block
    buffers: list[Any] = []

    def visit(realize: Any, mutator: Any) -> Any:
        realize = mutator.default_mutate(realize)
        block = realize.block
        if block.same_as(root) or not _is_opened(realize):
            return realize
        buffers.extend(block.alloc_buffers)
        bound = {
            each.var: value
            for each, value in zip(block.iter_vars, realize.iter_values, strict=True)
        }
        return ir.substitute(block.body, lambda var: bound.get(var, var))

    body = ir.mutate(root.body, (ir.SBlockRealize, visit))
    if not buffers and body.same_as(root.body):
        return func
    made = ir.block_like(root, body=body, alloc_buffers=[*root.alloc_buffers, *buffers])
    whole = ir.SBlockRealize([], func.body.predicate, made)
    return ir.with_body(func, whole)


def _is_opened(realize: Any) -> bool:
    block = realize.block
    plain = block.init is None and not len(block.match_buffers) and not len(block.annotations)
    return plain and ir.constant(realize.predicate) == 1 and _holds_blocks(block.body)


def _holds_blocks(body: Any) -> bool:
    found: list[Any] = []
    ir.walk(body, (ir.SBlockRealize, found.append))
    return bool(found)
