"""Scheduled functions as sequential ones, without threads, blocks and scopes.

States of threads are merged in pairs, as kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import combiner_of, is_reduction
from crossfuse.emulate.float_operators import as_on_gpu, by_bits, converted
from crossfuse.lower.extract import buffer_specs, only_function
from crossfuse.lower.hidden import keep_nans
from crossfuse.lower.image import BufferSpec
from crossfuse.lower.lower_merges import MergeBlock, read_merge
from crossfuse.markers import MERGE, thread_tag, unpadded_shapes

# Merges of the states of threads as kernels make them: in pairs, not one after the other.
#
# Of 128 states a running merge adds numbers 127 times, and each of these rounds; in pairs it is
# seven times. A check that rounds more often than the kernel is a check of something else.


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


# Functions whose arguments are smaller than the function's own: fewer rows, or shorter ones.


def in_block(func: Any, params: Any, body: Any, buffers: Any = ()) -> Any:
    """A function whose body is a block, as Relax expects when it searches for reshapes."""
    root = ir.SBlock([], [], [], "root", body, alloc_buffers=list(buffers))
    return ir.PrimFunc(params, ir.SBlockRealize([], True, root), func.ret_type, func.attrs)


def of_shapes(
    func: Any, specs: Sequence[BufferSpec], shapes: Sequence[tuple[Any, ...]], beyond: float
) -> Any:
    """A function of arguments of smaller shapes, which are padded with the number `beyond`."""
    params, inner, before, after = [], [], [], []
    for spec, shape, param in zip(specs, shapes, func.params, strict=True):
        if all(map(_same, shape, param.ty.shape)):
            params.append(param)
            continue
        inner.append(param)
        params.append(ir.tirx.decl_buffer(list(shape), spec.dtype, spec.name))
        if spec.output:
            after.append(_stored(params[-1], param, shape))
        else:
            before.append(_loaded(param, params[-1], shape, beyond))
    return in_block(func, params, ir.SeqStmt([*before, func.body, *after]), inner)


def _same(extent: Any, other: Any) -> bool:
    return ir.constant(extent) is not None and ir.constant(extent) == ir.constant(other)


def _inside(index: Sequence[Any], shape: Sequence[Any]) -> Any:
    return ir.tirx.all(*(each < extent for each, extent in zip(index, shape, strict=True)))


def _loaded(inner: Any, outer: Any, shape: Sequence[Any], beyond: float) -> Any:
    """Fill a tensor from a smaller one, padding it."""

    def statement(index: list[Any]) -> Any:
        nothing = ir.tirx.const(beyond, "float32").astype(inner.ty.dtype)
        value = ir.tirx.if_then_else(_inside(index, shape), outer[tuple(index)], nothing)
        return ir.BufferStore(inner, value, index)

    return _over(inner, statement)


def _stored(outer: Any, inner: Any, shape: Sequence[Any]) -> Any:
    """Store the part of a tensor that fits a smaller one."""

    def statement(index: list[Any]) -> Any:
        store = ir.BufferStore(outer, inner[tuple(index)], index)
        return ir.IfThenElse(_inside(index, shape), store, None)

    return _over(inner, statement)


def _over(buffer: Any, statement: Callable[[list[Any]], Any]) -> Any:
    """Loops over all elements of a tensor."""
    index = [ir.tirx.Var(f"i{axis}", "int64") for axis in range(len(buffer.ty.shape))]
    body = statement(index)
    for variable, extent in reversed(list(zip(index, buffer.ty.shape, strict=True))):
        body = ir.For(variable, 0, extent.astype("int64"), ir.ForKind.SERIAL, body)
    return body


#: Annotation of loops whose iterations may run in any order.
_FREE = "crossfuse.free_order"
_PARALLEL = (int(ir.ForKind.PARALLEL), int(ir.ForKind.THREAD_BINDING))


def serialise(func: Any, *, backwards: bool = False) -> Any:
    """Turn a scheduled function into a sequential one: serial loops without blocks, global buffers.

    Backwards, loops over CTAs and threads run from their last iteration to their first. Arguments
    are as callers pass them, before kernels copy them to padded rows. Buffers are as small as TVM
    makes them.
    """
    function = only_function(func)
    if unpadded_shapes(function):
        specs = buffer_specs(function)
        function = of_shapes(function, specs, [each.shape for each in specs], beyond=0.0)
    function = as_on_gpu(by_bits(keep_nans(function)))
    function = ir.with_body(function, merged_in_pairs(function.body))
    plain = _global_buffers(function.body)

    def serial(loop: Any, mutator: Any) -> Any:
        free = int(loop.kind) in _PARALLEL and not _merges(loop)
        annotations = {_FREE: True} if free else {}
        loop = mutator.default_mutate(loop)
        return ir.for_like(
            loop, loop.body, kind=ir.ForKind.SERIAL, thread_binding=None, annotations=annotations
        )

    def unmarked(block: Any, mutator: Any) -> Any:
        return ir.block_like(mutator.default_mutate(block), annotations={})

    body = ir.mutate(function.body, (ir.For, serial), (ir.SBlock, unmarked), (ir.Bind, _bound))
    body = ir.substitute(body, plain)
    return _without_blocks(ir.with_body(function, body), backwards)


def _bound(node: Any, _: Any) -> Any:
    """A named value, with conversions from bfloat16 spelt as operations on bits.

    TVM spells them out in stores only: LLVM would take the bits in a named value for an integer.
    """
    return ir.Bind(node.var, ir.mutate(node.value, (ir.tirx.Cast, _of_bits)))


def _of_bits(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    if str(node.value.ty) != "bfloat16":
        return node
    t = ir.tirx
    bits = t.Cast("uint32", t.reinterpret("uint16", node.value)) << t.const(16, "uint32")
    return converted(t.reinterpret("float32", bits), str(node.ty))


def _merges(loop: Any) -> bool:
    """Whether a loop over threads combines what they made, in an order that the lowering defines.

    It merges their states, or is the axis of a reduction. A reduction over CTAs has no such order,
    and an update that does not carry its element is none, whatever its axis is called.
    """
    realize = loop.body
    if not isinstance(realize, ir.SBlockRealize):
        return False
    block = realize.block
    if MERGE in block.annotations:
        return True
    if not thread_tag(loop).startswith("threadIdx.") or combiner_of(block) is None:
        return False
    pairs = zip(block.iter_vars, realize.iter_values, strict=True)
    driven = [each for each, value in pairs if ir.mentions(value, loop.loop_var)]
    return bool(driven) and all(map(is_reduction, driven))


def _without_blocks(function: Any, backwards: bool) -> Any:
    """Lower blocks; reverse free loops only once no pass derives sizes from them any more.

    TVM's compaction allocates too small a buffer where an index under a predicate runs backwards.
    """
    s = ir.s_tir.transform

    def turn(func: Any) -> Any:
        return ir.with_body(func, ir.mutate(func.body, (ir.For, _backwards)))

    passes = [
        s.CanonicalizeLoop(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.CompactBufferAllocation(),
        *([ir.prim_func_pass("RunBackwards", turn)] if backwards else []),
        s.LowerMatchBuffer(),
        s.LowerOpaqueBlock(),
    ]
    module = ir.tvm.ir.IRModule({"main": function.with_attr("global_symbol", "main")})
    return ir.tvm.ir.transform.Sequential(passes)(module)["main"]


def _backwards(loop: Any, mutator: Any) -> Any:
    loop = mutator.default_mutate(loop)
    if _FREE not in loop.annotations or ir.constant(loop.extent) == 1:
        return loop
    variable = loop.loop_var
    last = 2 * loop.min + loop.extent - 1 - variable
    # TVM does not see through the bits of another type, which spares us what it makes of falling
    # indices: (31 - i) // 32 becomes i // -32, another number.
    dtype = ir.tvm.DataType(str(variable.ty))
    bits = ir.tirx.reinterpret(f"float{dtype.bits}", last)
    mirrored = ir.tirx.reinterpret(str(dtype), bits)
    return ir.for_like(loop, ir.substitute(loop.body, {variable: mirrored}))


def _global_buffers(body: Any) -> dict[Any, Any]:
    """Replacements in global scope for all buffers in other scopes."""
    images: dict[Any, Any] = {}
    for block in ir.nodes(body, ir.SBlock):
        matched = [each.buffer for each in block.match_buffers]
        for buffer in [*block.alloc_buffers, *matched]:
            if buffer.scope() != "global":
                kind = buffer.ty
                images[buffer] = ir.tirx.decl_buffer(
                    list(kind.shape), kind.dtype, buffer.name, scope="global"
                )
    return images
