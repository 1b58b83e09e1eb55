"""A workload by torch's own operators, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.bench.convolution import eager_chain
from crossfuse.bench.variant import Variant, pack_apart
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.epilogue import affine
from crossfuse.workload.spec import WorkloadSpec


def eager(spec: WorkloadSpec, *, together: bool) -> Variant:
    """A workload by torch's own operators, one after another.

    A bias is a part of the product, as in ``torch.nn.Linear``, unless a scale comes before it. With
    `together`, gate and up of a gated FFN are one matrix and one product; other workloads are the
    same either way.
    """
    if isinstance(spec, ConvChainSpec):
        return eager_chain(spec)
    import torch

    from crossfuse.workload.torch_modules import activation

    joined = spec.gated and together
    names = [each.name for each in spec.operands[1:]]
    if joined:
        names = [_joined(each) for each in names if "_up" not in each]
    place = {name: number for number, name in enumerate(names)}
    dtype = getattr(torch, spec.out)

    def product(name: str) -> Any:
        scale, bias = (_joined(each) if joined else each for each in affine(spec, name))
        weight = name.replace("gemm0", "B").replace("gemm1", "D")
        at = place[_joined(weight) if joined else weight], place.get(scale), place.get(bias)
        return lambda x, tensors: _finished(spec, dtype, x, *(_take(tensors, each) for each in at))

    act = (lambda x: x) if spec.act == "identity" else activation(spec.act)
    *first, last = map(product, spec.products)
    residual = place.get("residual")

    def call(a: Any, *tensors: Any) -> Any:
        if joined:
            gate, up = first[0](a, tensors).chunk(2, dim=-1)
            output = last(act(gate) * up, tensors)
        elif spec.gated:
            output = last(act(first[0](a, tensors)) * first[1](a, tensors), tensors)
        else:
            output = last(act(first[0](a, tensors)), tensors) if first else act(last(a, tensors))
        return output if residual is None else output + tensors[residual]

    if joined:
        return Variant(lambda weights: _pack_joined(spec, weights), call, _NOTE + "concatenated")
    return Variant(pack_apart, call, _NOTE + "apart" if spec.gated else "")


_NOTE = "gate and up "


def _joined(name: str) -> str:
    """Name of the tensor that holds both gate and up."""
    return name.replace("_gate", "").replace("_up", "")


def _take(tensors: tuple[Any, ...], place: int | None) -> Any:
    return None if place is None else tensors[place]


def _finished(spec: WorkloadSpec, dtype: Any, x: Any, weight: Any, scale: Any, bias: Any) -> Any:
    """A product with its scale and its bias, in the type of the output."""
    import torch

    fused = None if scale is not None else bias
    if spec.weights == "nk":
        result = torch.nn.functional.linear(x, weight, fused)
    elif fused is not None:
        result = torch.addmm(fused, x, weight)
    else:
        result = torch.matmul(x, weight)
    if scale is None:
        return result
    result = result * scale
    return (result if bias is None else result + bias).to(dtype)


def _pack_joined(spec: WorkloadSpec, weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copies with gate and up concatenated: columns of the weights, biases, scales of columns."""
    import torch

    packed: list[Any] = []
    for name, each in weights.items():
        if "_up" in name:
            continue
        both = [each, weights[name.replace("_gate", "_up")]]
        if "_gate" not in name:
            packed.append(each.clone())
        elif name.startswith("scale"):
            packed.append(torch.cat([scale.expand(spec.N) for scale in both]))
        else:
            across = name.startswith("B") and spec.weights == "kn"
            packed.append(torch.cat(both, dim=1 if across else 0))
    return tuple(packed)
