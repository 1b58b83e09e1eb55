"""Chains of convolutions by torch's own operators, which cuDNN computes."""

from __future__ import annotations

from typing import Any

from crossfuse.bench.variant import Variant, pack_apart
from crossfuse.workload.conv_chain import ConvChainSpec


def eager_chain(spec: ConvChainSpec) -> Variant:
    """Two convolutions and the activation between, one after another, in channels_last.

    Parameters
    ----------
    spec : ConvChainSpec
        What is computed.

    Returns
    -------
    Variant
        Takes images NHWC and weights as the spec stores them; weights stored as [k, n] are turned
        into torch's order when a set is made. Nothing else is copied.
    """
    import torch

    from crossfuse.workload.torch_modules import activation

    act = (lambda x: x) if spec.act == "identity" else activation(spec.act)

    def pack(weights: Any) -> tuple[Any, ...]:
        b, d = pack_apart(weights)
        if spec.weights == "kn":
            b, d = b.t().contiguous(), d.t().contiguous()
        window = (spec.N, spec.k1, spec.k1, spec.IC)
        return channels_first(b.view(window)), channels_first(d.view(spec.L, 1, 1, spec.N))

    def channels_first(tensor: Any) -> Any:
        """The same memory, which torch calls channels_last of [batch, channels, ...]."""
        return tensor.permute(0, 3, 1, 2)

    def call(x: Any, b: Any, d: Any) -> Any:
        hidden = act(torch.conv2d(channels_first(x), b, padding=spec.k1 // 2))
        return torch.conv2d(hidden, d).permute(0, 2, 3, 1).reshape(spec.output)

    return Variant(pack, call, "conv2d in channels_last")
