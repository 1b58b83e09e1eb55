"""Merges of the states of threads as kernels make them: in pairs, not one after the other.

Of 128 states a running merge adds numbers 127 times, and each of these rounds; in pairs it is seven
times. A check that rounds more often than the kernel is a check of something else.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.lower_merges import MergeBlock, read_merge
from crossfuse.markers import MERGE


def merged_in_pairs(body: Any) -> Any:
    """Rewrite blocks marked `MERGE` whose loop takes in a power of two of states.

    The order is that of `crossfuse.lower.lower_merges`::

        for thread: OWN[thread] = SEGMENT[thread]
        for level, pair:
            first, distance = pair << (level + 1), 1 << level
            if first < threads: OWN[first] = merge(OWN[first], OWN[first + distance])
        RESULT = OWN[0]
    """

    def rewritten(loop: Any, mutator: Any) -> Any:
        realize = loop.body
        if not isinstance(realize, ir.SBlockRealize) or MERGE not in realize.block.annotations:
            return mutator.default_mutate(loop)
        merge, count = read_merge(realize), ir.constant(loop.extent) or 0
        values = zip(realize.block.iter_vars, realize.iter_values, strict=True)
        (place,) = (value for each, value in values if each.same_as(merge.reduced))
        if count < 2 or count & (count - 1) or not place.same_as(loop.loop_var):
            return loop
        return _pairs(merge, count)

    return ir.mutate(body, (ir.For, rewritten))


def _pairs(merge: MergeBlock, count: int) -> Any:
    """The block without its reduced iterator, which merges `count` states within itself."""
    old = merge.block
    own = [
        ir.tirx.decl_buffer([count], str(each.buffer.ty.dtype), f"{each.buffer.name}_own")
        for each in merge.into
    ]
    body = ir.SeqStmt([_taken(merge, own, count), _levels(merge, own, count), *_left(merge, own)])
    kept = [
        (each, value)
        for each, value in zip(old.iter_vars, merge.realize.iter_values, strict=True)
        if not each.same_as(merge.reduced)
    ]
    block = ir.SBlock(
        [each for each, _ in kept],
        [_whole(each.source) for each in merge.of],
        list(old.writes),
        old.name_hint,
        body,
        alloc_buffers=[*old.alloc_buffers, *own],
    )
    return ir.SBlockRealize([value for _, value in kept], merge.realize.predicate, block)


def _taken(merge: MergeBlock, own: list[Any], count: int) -> Any:
    """Statement: copy the states of all threads."""
    thread = merge.reduced.var
    at = ir.Var("state", str(thread.ty))
    stores = [
        ir.BufferStore(each, ir.substitute(of, {thread: at}), [at])
        for each, of in zip(own, merge.of, strict=True)
    ]
    return _loop(at, count, stores)


def _levels(merge: MergeBlock, own: list[Any], count: int) -> Any:
    """Statement: merge neighbours, then neighbours of merged ones, until one state is left."""
    dtype = str(merge.reduced.var.ty)
    level, pair = ir.Var("level", dtype), ir.Var("pair", dtype)
    one = ir.tirx.const(1, dtype)
    first, distance = pair << (level + one), one << level

    def left(load: Any, mutator: Any) -> Any:
        for each, store in zip(own, merge.into, strict=True):
            if load.source.same_as(store.buffer):
                return each[first]
        return mutator.default_mutate(load)

    statements = [
        ir.Bind(each, buffer[first + distance])
        for each, buffer in zip(merge.right, own, strict=True)
    ]
    statements += [ir.mutate(each, (ir.TensorLoad, left)) for each in merge.computed]
    statements += [
        ir.BufferStore(each, ir.mutate(store.value, (ir.TensorLoad, left)), [first])
        for each, store in zip(own, merge.into, strict=True)
    ]
    both = ir.IfThenElse(first < count, ir.SeqStmt(statements), None)
    return _loop(level, count.bit_length() - 1, [_loop(pair, count // 2, [both])])


def _left(merge: MergeBlock, own: list[Any]) -> list[Any]:
    """Statements: store the state that is left."""
    zero = ir.tirx.const(0, str(merge.reduced.var.ty))
    return [
        ir.BufferStore(store.buffer, each[zero], list(store.indices))
        for each, store in zip(own, merge.into, strict=True)
    ]


def _loop(variable: Any, extent: int, body: list[Any]) -> Any:
    whole = ir.SeqStmt(body) if len(body) > 1 else body[0]
    return ir.For(variable, 0, extent, ir.ForKind.SERIAL, whole)


def _whole(buffer: Any) -> Any:
    ranges = [ir.tvm.ir.Range.from_min_extent(0, extent) for extent in buffer.ty.shape]
    return ir.tirx.BufferRegion(buffer, ranges)
