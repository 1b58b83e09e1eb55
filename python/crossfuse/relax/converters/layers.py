"""Norms, attention, pools and resizing, with all of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from tvm import relax

from crossfuse.relax.converters.operands import argument, name_of, operand, result_type, tvm_own

_INSTANCE_EPSILON = 7
_DIVISOR = 6


def _batch_norm(node: fx.Node, importer: Any) -> Any:
    """Batch norm; TVM's takes the momentum for epsilon, the training flag for the momentum."""
    x, weight, bias, mean, variance, trains, momentum, epsilon, *_ = importer.retrieve_args(node)
    if trains or mean is None:
        raise NotImplementedError("a batch norm of the batch's own statistics")
    ones, zeros = relax.op.ones_like(mean), relax.op.zeros_like(mean)
    made = relax.op.nn.batch_norm(
        x,
        ones if weight is None else weight,
        zeros if bias is None else bias,
        mean,
        variance,
        axis=1,
        epsilon=epsilon,
        momentum=momentum,
        training=False,
    )
    return importer.block_builder.emit(importer.block_builder.emit(made)[0])


def _group_norm(node: fx.Node, importer: Any) -> Any:
    """Group norm; TVM's own fails without weights."""
    norm = partial(relax.op.nn.group_norm, num_groups=node.args[1])
    return _of_channels(norm, node, importer, 2, argument(node, 4, "eps", 1e-5))


def _instance_norm(node: fx.Node, importer: Any) -> Any:
    """Instance norm; TVM's own takes the variance for epsilon."""
    if not node.args[5]:
        raise NotImplementedError("an instance norm of running statistics")
    epsilon = node.args[_INSTANCE_EPSILON]
    return _of_channels(relax.op.nn.instance_norm, node, importer, 1, epsilon)


def _of_channels(
    norm: Callable[..., Any], node: fx.Node, importer: Any, place: int, epsilon: Any
) -> Any:
    """A norm whose weight and bias, from `place` on, are ones and zeros if None."""
    x = importer.env[node.args[0]]
    shape, dtype = (int(node.meta["val"].shape[1]),), result_type(node)
    weight, bias = (argument(node, place + i, name) for i, name in enumerate(("weight", "bias")))
    ones, zeros = (relax.op.full(shape, relax.const(each, dtype), dtype) for each in (1, 0))
    made = norm(
        x,
        ones if weight is None else importer.env[weight],
        zeros if bias is None else importer.env[bias],
        channel_axis=1,
        axes=list(range(2, x.ty.ndim)),
        epsilon=epsilon,
    )
    return importer.block_builder.emit(made)


def _attention(node: fx.Node, importer: Any) -> Any:
    """Attention with its scale, for as many heads of keys as of queries.

    A boolean mask is left to torch's decomposition, which handles rows without any key.
    """
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    query, value = (each.meta["val"] for each in (node.args[0], node.args[2]))
    alike = query.dim() == 4 and query.shape[:2] == node.args[1].meta["val"].shape[:2]
    if not alike or query.shape[:2] != value.shape[:2]:
        raise NotImplementedError("attention of other than 4 extents, or of fewer heads of keys")
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        raise NotImplementedError("attention with a mask of flags")
    emit = importer.block_builder.emit
    given = [emit(relax.op.permute_dims(importer.env[x], [0, 2, 1, 3])) for x in node.args[:3]]
    made = relax.op.nn.attention(
        *given,
        bias=None if mask is None else operand(mask, importer, result_type(node)),
        scale=node.kwargs.get("scale"),
        causal_mask="TopLeft" if causal else None,
    )
    return emit(relax.op.permute_dims(emit(made), [0, 2, 1, 3]))


def _average_pool(node: fx.Node, importer: Any) -> Any:
    """Average pool; TVM's own drops the divisor."""
    if argument(node, _DIVISOR, "divisor_override") is not None:
        raise NotImplementedError("an average pool with a divisor of its own")
    return tvm_own(node, importer)


def _nearest(node: fx.Node, importer: Any) -> Any:
    """The pixel at ``floor(place * in / out)``; TVM's own counts from the centres of pixels."""
    x, factors = node.args[0], argument(node, 2, "scale_factors")
    (*_, height, width), size = x.meta["val"].shape, tuple(node.meta["val"].shape[2:])
    for given, made, factor in zip((height, width), size, factors or (), strict=False):
        if given * factor != made:
            raise NotImplementedError(f"a resize of {given} by {factor}, which is no integer")
    made = relax.op.image.resize2d(
        importer.env[x],
        size,
        layout="NCHW",
        method="nearest_neighbor",
        coordinate_transformation_mode="asymmetric",
        rounding_method="floor",
    )
    return importer.block_builder.emit(made)


def _smooth_resize(node: fx.Node, _importer: Any) -> Any:
    raise NotImplementedError(f"{node.target}, of which TVM leaves the smoothing out")


def _trained_batch_norm(node: fx.Node, _importer: Any) -> Any:
    raise NotImplementedError(f"{node.target}, of whose results TVM makes the first alone")


def _pad(node: fx.Node, importer: Any) -> Any:
    """A pad; TVM's own takes elements of wrong places where it cuts edges off."""
    mode, widths = argument(node, 2, "mode", "constant"), node.args[1]
    if mode != "constant" and any(isinstance(each, int) and each < 0 for each in widths):
        raise NotImplementedError(f"a pad of mode {mode} that cuts edges off")
    return tvm_own(node, importer)


def _cross_entropy(node: fx.Node, _importer: Any) -> Any:
    """Left to its parts: TVM's reads reduction, ignored label and smoothing by name alone.

    Export gives them by position. Its classes are the last axis, and not the second, and it loads
    the element of an ignored label, which is in front of the tensor.
    """
    raise NotImplementedError(f"{node.target}, whose options TVM leaves out")


# Products, casts and reshapes.
#
# TVM's converters declare every product float32, so that a bias or a second layer in a 2-byte type
# no longer fits, and the output changes its type.


def _plain(operator: Callable[..., Any]) -> Any:
    """A converter to one operator of the same arguments."""

    def convert(node: fx.Node, importer: Any) -> Any:
        return importer.block_builder.emit(operator(*importer.retrieve_args(node)))

    return convert


def _addmm(node: fx.Node, importer: Any) -> Any:
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


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return relax.op.astype(x, name_of(dtype))


def _convolution(node: fx.Node, importer: Any) -> Any:
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
LAYERS = {
    "batch_norm.default": _batch_norm,
    "group_norm.default": _group_norm,
    "instance_norm.default": _instance_norm,
    "scaled_dot_product_attention.default": _attention,
    "avg_pool2d.default": _average_pool,
    "upsample_nearest2d.vec": _nearest,
    "_upsample_bilinear2d_aa.default": _smooth_resize,
    "cross_entropy_loss.default": _cross_entropy,
    "_native_batch_norm_legit_functional.default": _trained_batch_norm,
    "pad.default": _pad,
    "linear.default": _plain(relax.op.linear),
    "conv2d.default": _convolution,
    "addmm.default": _addmm,
    "convert_element_type.default": _plain(_cast),
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default"), _plain(relax.op.matmul)),
    # Before decomposition.
    "t.default": _plain(relax.op.permute_dims),
    "_unsafe_view.default": _plain(relax.op.reshape),
}
