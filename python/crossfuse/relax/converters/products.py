"""Products, casts and reshapes.

TVM's own declare every product float32, so that a bias or a second layer in a 2-byte type no longer
fits, and the output changes its type.
"""

from __future__ import annotations

from typing import Any

from tvm import relax


def _linear(node: Any, importer: Any) -> Any:
    x, weight, *bias = importer.retrieve_args(node)
    product = relax.op.linear(x, weight, bias[0] if bias else None)
    return importer.block_builder.emit(product)


def _matmul(node: Any, importer: Any) -> Any:
    left, right = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.matmul(left, right))


def _addmm(node: Any, importer: Any) -> Any:
    bias, left, right = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    product = emit(relax.op.matmul(left, right))
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    dtype = str(product.ty.dtype)
    if alpha != 1:
        product = emit(relax.op.multiply(product, relax.const(alpha, dtype)))
    if beta != 1:
        bias = emit(relax.op.multiply(bias, relax.const(beta, dtype)))
    return emit(relax.op.add(product, bias))


def _transpose(node: Any, importer: Any) -> Any:
    (x,) = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.permute_dims(x))


def _reshape(node: Any, importer: Any) -> Any:
    x, shape = importer.retrieve_args(node)
    return importer.block_builder.emit(relax.op.reshape(x, shape))


def _cast(node: Any, importer: Any) -> Any:
    x, dtype = importer.retrieve_args(node)
    name = str(dtype).removeprefix("torch.")
    return importer.block_builder.emit(relax.op.astype(x, name))


def _convolution(node: Any, importer: Any) -> Any:
    x, weight, *rest = importer.retrieve_args(node)
    bias, *options = (*rest, None)[: max(1, len(rest))]
    names = ("strides", "padding", "dilation", "groups")
    product = relax.op.nn.conv2d(x, weight, **dict(zip(names, options, strict=False)))
    result = importer.block_builder.emit(product)
    if bias is None:
        return result
    column = importer.block_builder.emit(relax.op.reshape(bias, (1, -1, 1, 1)))
    return importer.block_builder.emit(relax.op.add(result, column))


#: By the name of the operator.
PRODUCTS = {
    "linear.default": _linear,
    "conv2d.default": _convolution,
    "addmm.default": _addmm,
    "convert_element_type.default": _cast,
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default"), _matmul),
    # Before decomposition.
    "t.default": _transpose,
    "_unsafe_view.default": _reshape,
}
