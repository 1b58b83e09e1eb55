"""Operators that move elements, and constants that are not finite.

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
    """TVM's own conversion, with negative indices counted from the front."""
    x, places = node.args
    emit, known, counted = importer.block_builder.emit, importer.env, {}
    for size, place in zip(known[x].ty.shape.values, places, strict=False):
        index = None if place is None else known[place]
        if index is None or not isinstance(size, tirx.IntImm):
            continue
        dtype = str(index.ty.dtype)
        if dtype not in ("int32", "int64"):
            raise NotImplementedError(f"indices of {dtype}")
        counted[place] = _from_front(index, int(size), emit)
    importer.env = ChainMap(counted, known)
    try:
        return tvm_own(node, importer)
    finally:
        importer.env = known


def _from_front(index: Any, size: int, emit: Any) -> Any:
    """Indices, of which negative ones count from the end, counted from the front."""
    dtype = str(index.ty.dtype)
    negative = emit(relax.op.less(index, relax.const(0, dtype)))
    moved = emit(relax.op.add(index, relax.const(size, dtype)))
    return emit(relax.op.where(negative, moved, index))


def _index_put(node: fx.Node, importer: Any) -> Any:
    """``x[i, :, j] = values``, by places in the flat ``x``.

    TVM's own reads values in another order where an index leaves out a dimension behind others, and
    prints a line for each index of several dimensions.
    """
    x, places, values, *rest = node.args
    accumulate = bool(rest[0]) if rest else bool(node.kwargs.get("accumulate", False))
    emit, value = importer.block_builder.emit, importer.env[x]
    sizes = list(value.ty.shape.values)
    places = [*places, *[None] * (len(sizes) - len(places))]
    given = {at: importer.env[each] for at, each in enumerate(places) if each is not None}
    for each in given.values():
        if str(each.ty.dtype) not in ("int32", "int64"):
            raise NotImplementedError(f"indices of {each.ty.dtype}")
    if not all(isinstance(each, tirx.IntImm) for each in sizes):
        raise NotImplementedError("places in a tensor of symbolic shape")
    wide = max((each.ty.ndim for each in given.values()), default=0)
    # Dimensions of the indices stand where the first of them does, or in front if others part them.
    together = sorted(given) == list(range(min(given, default=0), max(given, default=-1) + 1))
    first = min(given, default=0) if together else 0
    free = [at for at in range(len(sizes)) if at not in given]
    axes = [*free[: sum(at < first for at in free)], *["index"] * wide]
    axes += free[len(axes) - wide :]
    flat: Any = None
    stride = 1
    for at in reversed(range(len(sizes))):
        size = int(sizes[at])
        place = _place(at, size, given.get(at), axes, emit)
        place = emit(relax.op.multiply(place, relax.const(stride, "int64")))
        flat = place if flat is None else emit(relax.op.add(place, flat))
        stride *= size
    row = emit(relax.op.reshape(flat, [-1]))
    put = emit(
        relax.op.reshape(emit(relax.op.broadcast_to(importer.env[values], flat.ty.shape)), [-1])
    )
    data = emit(relax.op.reshape(value, [-1]))
    changed = emit(relax.op.index_put(data, relax.Tuple([row]), put, accumulate))
    return emit(relax.op.reshape(changed, sizes))


def _place(at: int, size: int, index: Any, axes: list[Any], emit: Any) -> Any:
    """Index along a dimension, shaped to broadcast over the `axes` of what is written."""
    if index is None:
        every = emit(relax.op.arange(0, size, 1, "int64"))
        return emit(relax.op.reshape(every, [size if axis == at else 1 for axis in axes]))
    index = _from_front(emit(relax.op.astype(index, "int64")), size, emit)
    own, wide = list(index.ty.shape.values), axes.count("index")
    own = [1] * (wide - len(own)) + own
    left = iter(own)
    return emit(relax.op.reshape(index, [next(left) if each == "index" else 1 for each in axes]))


def _full(node: fx.Node, importer: Any) -> Any:
    """A constant tensor; TVM's own fails at infinities, which masks are made of."""
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
    return importer.block_builder.emit(relax.op.concat(parts, argument(node, 1, "dim", 0)))


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
    first = emit(relax.op.expand_dims(starts, 1))
    places = emit(relax.op.add(first, emit(relax.op.arange(0, size, 1, "int64"))))
    windows = emit(relax.op.take(value, places, axis))
    order = [each for each in range(rank + 1) if each != axis + 1]
    return emit(relax.op.permute_dims(windows, [*order, axis + 1]))


def _repeat_interleave(node: fx.Node, importer: Any) -> Any:
    """Each element several times in a row; without an axis, of the flat tensor."""
    x, repeats = node.args[:2]
    axis = argument(node, 2, "dim")
    return importer.block_builder.emit(relax.op.repeat(importer.env[x], int(repeats), axis))


# Sorting with NaN above all other elements, as in torch.
#
# TVM's own compare NaN like any number, and their results are in no order then.

#: The wider type that elements are compared in, and the number that stands for infinity there.
_KEYS = {
    "float16": ("float32", 3.4e38),
    "bfloat16": ("float32", 3.4e38),
    "float32": ("float64", 1e300),
}


def _topk(node: fx.Node, importer: Any) -> Any:
    """The largest or smallest elements, sorted even where torch leaves the order open."""
    value, axis, emit = _of(node, importer, 2)
    places = relax.op.topk(
        _key(value, emit),
        k=int(argument(node, 1, "k")),
        axis=axis,
        ret_type="indices",
        largest=argument(node, 3, "largest", True),
        dtype="int64",
    )
    return _taken(value, emit(places), axis, emit)


def _sort(node: fx.Node, importer: Any) -> Any:
    value, axis, emit = _of(node, importer, 1)
    return _taken(value, _sorted(node, value, axis, emit), axis, emit)


def _argsort(node: fx.Node, importer: Any) -> Any:
    value, axis, emit = _of(node, importer, 1)
    return _sorted(node, value, axis, emit)


def _sorted(node: fx.Node, value: Any, axis: int, emit: Any) -> Any:
    falling = argument(node, 2, "descending", False)
    return emit(relax.op.argsort(_key(value, emit), axis=axis, descending=falling, dtype="int64"))


def _median(node: fx.Node, importer: Any) -> Any:
    raise NotImplementedError("a median, of which TVM takes another element in bfloat16")


def _of(node: fx.Node, importer: Any, place: int) -> tuple[Any, int, Any]:
    """The tensor to be ordered, the axis, and the builder's emit."""
    value = importer.env[node.args[0]]
    axis = argument(node, place, "dim", -1)
    return value, axis % value.ty.ndim, importer.block_builder.emit


def _key(value: Any, emit: Any) -> Any:
    """The sort key: floats in a wider type, in which NaN is infinite and infinity is not."""
    known = _KEYS.get(str(value.ty.dtype))
    if known is None:
        return value
    dtype, most = known
    wide = emit(relax.op.astype(value, dtype))
    bounded = emit(relax.op.minimum(wide, relax.const(most, dtype)))
    one = emit(relax.op.full_like(wide, relax.const(1, dtype)))
    infinite = emit(relax.op.multiply(one, relax.const(math.inf, dtype)))
    return emit(relax.op.where(emit(relax.op.isnan(wide)), infinite, bounded))


def _taken(value: Any, places: Any, axis: int, emit: Any) -> Any:
    found = emit(relax.op.gather_elements(value, places, axis))
    return emit(relax.Tuple([found, places]))


#: By the name of the operator.
PLACES = {
    "unfold.default": _unfold,
    "repeat_interleave.self_int": _repeat_interleave,
    "select.int": _select,
    "index.Tensor": _index,
    **dict.fromkeys(("index_put.default", "_unsafe_index_put.default"), _index_put),
    "full.default": _full,
    "full_like.default": _full_like,
    **dict.fromkeys(("cat.default", "concat.default"), _cat),
    "pixel_shuffle.default": _pixel_shuffle,
    "topk.default": _topk,
    "sort.default": _sort,
    "argsort.default": _argsort,
    **dict.fromkeys(("median.default", "median.dim"), _median),
}
