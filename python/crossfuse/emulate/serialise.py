"""Scheduled functions as sequential ones, without threads, blocks and scopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import combiner_of, is_reduction
from crossfuse.emulate.float_operators import as_on_gpu
from crossfuse.emulate.merge_pairs import merged_in_pairs
from crossfuse.emulate.widen import converted, widen
from crossfuse.lower.extract import buffer_specs, only_function
from crossfuse.lower.image import BufferSpec
from crossfuse.lower.keep_nans import keep_nans
from crossfuse.markers import MERGE, thread_tag, unpadded_shapes

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


def serialise(func: Any, *, backwards: bool = False, few_bits: Callable[[Any], Any] = widen) -> Any:
    """Turn a scheduled function into a sequential one: serial loops without blocks, global buffers.

    Backwards, loops over CTAs and threads run from their last iteration to their first. Arguments
    are as callers pass them, before kernels copy them to padded rows. Buffers are as small as TVM
    makes them. `few_bits` makes 8-bit floats right: as tensors of float32, or as they are stored.
    """
    function = only_function(func)
    if unpadded_shapes(function):
        specs = buffer_specs(function)
        function = of_shapes(function, specs, [each.shape for each in specs], beyond=0.0)
    function = as_on_gpu(few_bits(keep_nans(function)))
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
