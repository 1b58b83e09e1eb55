"""Attention as a TIR function whose sums are in float32, for ``LegalizeOps``.

TVM's own adds in the type of the operands, and takes the maximum of causal scores together with
zeros in the place of those that are masked: far below zero all that is left underflows.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx, topi

#: Types that are added in float32.
_NARROW = ("float16", "bfloat16")


def _attention(builder: Any, call: Any) -> Any:
    """The call of a function that computes ``relax.nn.attention``, with or without a bias."""
    if call.attrs.window_size is not None:
        from tvm.relax.transform.legalize_ops.nn import _nn_attention

        return _nn_attention(builder, call)  # which says that it has none
    q, k, v, *bias = call.args
    name = str(call.op.name).rpartition(".")[2]
    options = (call.attrs.scale, call.attrs.causal_mask)
    return builder.call_te(_expressions, q, k, v, bias, *options, primfunc_name_hint=name)


def _expressions(
    q: Any, k: Any, v: Any, bias: list[Any], scale: Any, causal: str | None
) -> te.Tensor:
    """Of [batch, rows, heads, depth]; a bias is one of [batch, heads, rows, keys]."""
    dtype = str(q.dtype)
    wide = "float32" if dtype in _NARROW else dtype
    depth, offset = q.shape[-1], 0 if causal == "TopLeft" else k.shape[1] - q.shape[1]
    q, k, v = (topi.transpose(each, [0, 2, 1, 3]) for each in (q, k, v))
    scores = _product(q, topi.transpose(k, [0, 1, 3, 2]), wide)
    factor = int(depth) ** -0.5 if scale is None else float(scale)
    scores = topi.multiply(scores, tirx.const(factor, wide))
    for each in bias:
        scores = topi.add(scores, topi.cast(each, wide))
    if causal is not None:
        least = tirx.min_value(wide)
        scores = te.compute(
            scores.shape,
            lambda b, h, i, j: tirx.if_then_else(j <= i + offset, scores[b, h, i, j], least),
            name="causal",
        )
    chances = topi.cast(topi.nn.softmax(scores, axis=-1), dtype)
    return topi.transpose(topi.cast(_product(chances, v, wide), dtype), [0, 2, 1, 3])


def _product(left: te.Tensor, right: te.Tensor, wide: str) -> te.Tensor:
    """``left @ right`` of each head, added in a type."""
    batch, heads, rows, length = left.shape
    at = te.reduce_axis((0, length), name="k")
    return te.compute(
        (batch, heads, rows, right.shape[-1]),
        lambda b, h, i, j: te.sum(
            left[b, h, i, at].astype(wide) * right[b, h, at, j].astype(wide), axis=at
        ),
        name="product",
    )


#: For ``LegalizeOps``, by operator.
ATTENTION = dict.fromkeys(("relax.nn.attention", "relax.nn.attention_bias"), _attention)
