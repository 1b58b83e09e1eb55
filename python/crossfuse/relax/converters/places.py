"""Elements at other places, and constants that are no finite numbers.

TVM's own read in front of a tensor where an index is negative, as in ``x[:, -1]``.
"""

from __future__ import annotations

import math
from collections import ChainMap
from typing import Any

from torch import fx
from tvm import relax, tirx

from crossfuse.relax.converters.operands import argument, filled, operand, result_type, tvm_own


def _select(node: fx.Node, importer: Any) -> Any:
    x, axis, index = node.args
    value, emit = importer.env[x], importer.block_builder.emit
    if not isinstance(index, int):
        return tvm_own(node, importer)
    size = value.ty.shape.values[axis]
    if index >= 0 or isinstance(size, tirx.IntImm):
        place = index % int(size) if index < 0 else index
        return emit(relax.op.take(value, relax.const(place, "int64"), axis))
    # An extent that is symbolic is no constant that could be taken.
    last = relax.op.strided_slice(value, [axis], [size + index], [size + index + 1])
    return emit(relax.op.squeeze(emit(last), [axis]))


def _index(node: fx.Node, importer: Any) -> Any:
    """TVM's own, of indices that are counted from the front."""
    x, places = node.args
    emit, known, counted = importer.block_builder.emit, importer.env, {}
    for size, place in zip(known[x].ty.shape.values, places, strict=False):
        index = None if place is None else known[place]
        if index is None or not isinstance(size, tirx.IntImm):
            continue
        dtype = str(index.ty.dtype)
        if dtype not in ("int32", "int64"):
            raise NotImplementedError(f"indices of {dtype}")
        negative = emit(relax.op.less(index, relax.const(0, dtype)))
        moved = emit(relax.op.add(index, relax.const(int(size), dtype)))
        counted[place] = emit(relax.op.where(negative, moved, index))
    importer.env = ChainMap(counted, known)
    try:
        return tvm_own(node, importer)
    finally:
        importer.env = known


def _full(node: fx.Node, importer: Any) -> Any:
    """A constant; TVM's own fail at infinities, which masks are made of."""
    value = node.args[1]
    if not isinstance(value, float) or math.isfinite(value):
        return tvm_own(node, importer)
    dtype, shape = result_type(node), list(importer.retrieve_args(node)[0])
    one = importer.block_builder.emit(relax.op.full(shape, relax.const(1, dtype), dtype))
    return importer.block_builder.emit(relax.op.multiply(one, relax.const(value, dtype)))


def _full_like(node: fx.Node, importer: Any) -> Any:
    like, value = node.args[:2]
    if not isinstance(value, (bool, int, float)):
        return tvm_own(node, importer)
    return filled(operand(like, importer, result_type(node)), value, importer)


def _cat(node: fx.Node, importer: Any) -> Any:
    parts = [operand(each, importer, result_type(node)) for each in node.args[0]]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return importer.block_builder.emit(relax.op.concat(parts, axis))


def _pixel_shuffle(node: fx.Node, importer: Any) -> Any:
    """``[n, c r r, h, w]`` to ``[n, c, h r, w r]``; TVM declares it and does not define it."""
    (x, factor), emit = node.args, importer.block_builder.emit
    value = importer.env[x]
    *front, channels, height, width = value.ty.shape.values
    first, r = len(front), int(factor)
    parted = emit(relax.op.reshape(value, (*front, channels // (r * r), r, r, height, width)))
    axes = [*range(first), *(first + each for each in (0, 3, 1, 4, 2))]
    moved = emit(relax.op.permute_dims(parted, axes))
    return emit(relax.op.reshape(moved, (*front, channels // (r * r), height * r, width * r)))


def _unfold(node: fx.Node, importer: Any) -> Any:
    """Windows of ``size`` elements along an axis, every ``step``; they become the last axis."""
    x, axis, size, step = node.args
    value, emit = importer.env[x], importer.block_builder.emit
    extent, rank = value.ty.shape.values[axis], int(value.ty.ndim)
    if not isinstance(extent, tirx.IntImm):
        raise NotImplementedError("windows along an axis of symbolic extent")
    axis %= rank
    count = (int(extent) - size) // step + 1
    starts = emit(relax.op.arange(0, count * step, step, "int64"))
    places = emit(relax.op.add(emit(relax.op.expand_dims(starts, 1)), _up_to(size, emit)))
    windows = emit(relax.op.take(value, places, axis))
    order = [each for each in range(rank + 1) if each != axis + 1]
    return emit(relax.op.permute_dims(windows, [*order, axis + 1]))


def _up_to(size: int, emit: Any) -> Any:
    return emit(relax.op.arange(0, size, 1, "int64"))


def _repeat_interleave(node: fx.Node, importer: Any) -> Any:
    """Each element several times, one after the other; without an axis, of the flat tensor."""
    x, repeats = node.args[:2]
    axis = argument(node, 2, "dim")
    return importer.block_builder.emit(relax.op.repeat(importer.env[x], int(repeats), axis))


#: By the name of the operator.
PLACES = {
    "unfold.default": _unfold,
    "repeat_interleave.self_int": _repeat_interleave,
    "select.int": _select,
    "index.Tensor": _index,
    "full.default": _full,
    "full_like.default": _full_like,
    **dict.fromkeys(("cat.default", "concat.default"), _cat),
    "pixel_shuffle.default": _pixel_shuffle,
}
