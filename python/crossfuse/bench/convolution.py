"""Chains of convolutions by torch's own operators, which call cuDNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.bench.variant import Variant
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.epilogue import affine


def eager_chain(spec: ConvChainSpec) -> Variant:
    """Two convolutions and the activation between them, one after another, in channels_last.

    A bias is a part of the convolution, unless a scale comes before it. Images are NHWC, weights as
    the spec stores them; those stored as [k, n] are brought into torch's order when a set is
    packed. Nothing else is copied.
    """
    from crossfuse.workload.torch_modules import activation

    act = (lambda x: x) if spec.act == "identity" else activation(spec.act)
    windows = {"B": (spec.N, spec.k1, spec.k1, spec.IC), "D": (spec.L, 1, 1, spec.N)}
    names = [each.name for each in spec.operands[1:]]

    def pack(given: Mapping[str, Any]) -> tuple[Any, ...]:
        packed = dict(given)
        for name, shape in windows.items():
            stored = packed[name].t() if spec.weights == "kn" else packed[name]
            packed[name] = _channels_first(stored.contiguous().view(shape))
        return tuple(packed[name].clone() for name in names)

    def call(x: Any, *tensors: Any) -> Any:
        named = dict(zip(names, tensors, strict=True))
        hidden = act(_convolved(spec, _channels_first(x), "gemm0", named, spec.k1 // 2))
        last = _convolved(spec, hidden, "gemm1", named, 0)
        output = last.permute(0, 2, 3, 1).reshape(spec.output)
        return output + named["residual"] if spec.residual else output

    return Variant(pack, call, "conv2d in channels_last")


def _channels_first(tensor: Any) -> Any:
    """A view of the same memory as [batch, channels, ...], torch's channels_last."""
    return tensor.permute(0, 3, 1, 2)


def _convolved(
    spec: ConvChainSpec, x: Any, product: str, named: Mapping[str, Any], rim: int
) -> Any:
    """A convolution with its scale and its bias."""
    import torch

    scale, bias = affine(spec, product)
    weight = named[product.replace("gemm0", "B").replace("gemm1", "D")]
    result = torch.conv2d(x, weight, None if scale else named.get(bias), padding=rim)
    if not scale:
        return result
    result = result * named[scale]
    return (result + named[bias].view(1, -1, 1, 1) if bias else result).to(x.dtype)
