"""Long sums that LLVM computes for TVM, in float64, where a GPU adds them up in parts.

TVM's loops add one term after the other. Their errors grow with the number of terms, those of
torch and of a GPU's threads with its logarithm.
"""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import combiner_of, is_reduction

_NARROW, _WIDE = "float32", "float64"
#: Terms from which on a sum is long.
_LONG = 16


def exact_sums(func: Any) -> Any:
    """Take the long sums of float32 of an unscheduled function in float64, and round them once."""
    names = [each.name_hint for each in ir.nodes(func.body, ir.SBlock) if _is_long(each)]
    if not names:
        return func
    sch = ir.Schedule(func)
    wide: dict[Any, Any] = {}
    for name in names:
        block = sch.get_sblock(name)
        sch.cache_write(block, 0, "global")
        sums = sch.get(block).writes[0].source
        wide[sums] = ir.tirx.decl_buffer(list(sums.ty.shape), _WIDE, sums.name)
    return ir.with_body(func, _widened(sch.mod["main"].body, wide))


def _is_long(block: Any) -> bool:
    summed = [each.dom.extent for each in block.iter_vars if is_reduction(each)]
    if not summed or combiner_of(block) != "sum":
        return False
    terms = prod(ir.constant(each) or _LONG for each in summed)  # a symbolic extent may be any
    return terms >= _LONG and str(block.body.buffer.ty.dtype) == _NARROW


def _widened(body: Any, wide: dict[Any, Any]) -> Any:
    """Have buffers that only sums and copies of them use hold wider numbers."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.source not in wide:
            return node
        return ir.tirx.Cast(_NARROW, ir.tirx.BufferLoad(wide[node.source], list(node.indices)))

    def store(node: Any, mutator: Any) -> Any:
        if node.buffer not in wide:
            return mutator.default_mutate(node)
        buffer, indices = wide[node.buffer], list(node.indices)
        value = node.value
        if not isinstance(value, ir.tirx.Add):  # what the sum starts with
            return ir.BufferStore(buffer, ir.tirx.Cast(_WIDE, mutator.mutate(value)), indices)
        own = isinstance(value.a, ir.TensorLoad) and value.a.source.same_as(node.buffer)
        term = mutator.mutate(value.b if own else value.a)
        so_far = ir.tirx.BufferLoad(buffer, indices)
        return ir.BufferStore(buffer, so_far + ir.tirx.Cast(_WIDE, term), indices)

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        reads, writes = (
            [ir.tirx.BufferRegion(wide.get(e.source, e.source), e.region) for e in regions]
            for regions in (node.reads, node.writes)
        )
        allocated = [wide.get(each, each) for each in node.alloc_buffers]
        return ir.block_like(node, reads=reads, writes=writes, alloc_buffers=allocated)

    callbacks = ((ir.TensorLoad, load), (ir.BufferStore, store), (ir.SBlock, block))
    return ir.mutate(body, *callbacks)
