"""Elements in order, NaN among them: as torch has it, NaN is larger than all others.

TVM's own compare with NaN as it comes, and what they return then is in no order.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.operands import argument

#: What elements of a type are compared in, and what stands for infinity there.
_KEYS = {
    "float16": ("float32", 3.4e38),
    "bfloat16": ("float32", 3.4e38),
    "float32": ("float64", 1e300),
}


def _topk(node: fx.Node, importer: Any) -> Any:
    """The largest or smallest elements. What may come in any order comes sorted too."""
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
    """What is ordered, along which axis, and what emits."""
    value = importer.env[node.args[0]]
    axis = argument(node, place, "dim", -1)
    return value, axis % value.ty.ndim, importer.block_builder.emit


def _key(value: Any, emit: Any) -> Any:
    """What is compared: floats in a wider type, in which NaN is infinite and infinity is not."""
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
ORDER = {
    "topk.default": _topk,
    "sort.default": _sort,
    "argsort.default": _argsort,
    **dict.fromkeys(("median.default", "median.dim"), _median),
}
