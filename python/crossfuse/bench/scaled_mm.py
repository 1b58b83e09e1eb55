"""Products of 8-bit floats by cuBLASLt, as `torch._scaled_mm` calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse.bench.variant import Variant, no_such
from crossfuse.workload.spec import WorkloadSpec

_OPERAND = "float8_e4m3fn"
_OUTPUTS = ("bfloat16", "float16")
# Extents that torch._scaled_mm takes: rows of both operands are multiples of 16 bytes, and so is
# the number of columns.
_MULTIPLE = 16


def scaled_mm(name: str, spec: WorkloadSpec, device: str, *, fast: bool) -> Variant:
    """A product of 8-bit floats by cuBLASLt, with the scale of the workload, or a scale of one.

    The weights are [n, k] in memory, which is the one layout that cuBLASLt has kernels for on
    Hopper; a workload that stores them as [k, n] is transposed before the clock starts. A bias is a
    part of the product, in the type of the output. An activation and a residual are torch's own, in
    kernels after the product, as eager code would do it. With `fast`, sums stay in the tensor
    core's accumulator of fewer bits from the first step to the last (``use_fast_accum``); otherwise
    they are added up in float32 every few steps. Refused is all but a gemm of sums of float8_e4m3fn
    to bfloat16 or float16: cuBLASLt has no product of two float8_e5m2 matrices.
    """
    import torch

    from crossfuse.workload.torch_modules import activation

    _check(name, spec)
    one = torch.ones((), dtype=torch.float32, device=device)
    out = getattr(torch, spec.out)
    act = None if spec.act == "identity" else activation(spec.act)

    def pack(weights: Mapping[str, Any]) -> tuple[Any, ...]:
        stored = weights["B"]
        b = stored.clone() if spec.weights == "nk" else stored.t().contiguous()
        scale = weights["scale0"].clone().reshape(()) if spec.scale else one
        others = (
            weights[each].to(out, copy=True) for each in ("bias0", "residual") if each in weights
        )
        return (b, scale, *others)

    def call(a: Any, b: Any, scale: Any, *others: Any) -> Any:
        bias = others[0] if spec.bias else None
        residual = others[-1] if spec.residual else None
        product = torch._scaled_mm(
            a, b.t(), scale_a=scale, scale_b=one, bias=bias, out_dtype=out, use_fast_accum=fast
        )
        product = product if act is None else act(product)
        return product if residual is None else product + residual

    note = f"torch._scaled_mm, scales of {'the workload' if spec.scale else 'one'}, "
    note += ("fast" if fast else "float32") + " accumulation"
    return Variant(pack, call, note + ("" if act is None else f", then {spec.act}"))


def _check(name: str, spec: WorkloadSpec) -> None:
    if spec.kind != "gemm" or spec.combine != "sum":
        raise no_such(name, spec, "kind gemm with sums", "measure ours alone")
    if spec.dtype != _OPERAND or spec.out not in _OUTPUTS:
        limit = f"inputs of {_OPERAND} and an output of {' or '.join(_OUTPUTS)}, as cuBLASLt has it"
        plain = "take eager for 2-byte and 4-byte floats"
        raise no_such(name, spec, limit, f"add dtype={_OPERAND},out=bfloat16, or {plain}")
    if spec.K % _MULTIPLE or spec.N % _MULTIPLE:
        limit = f"K and N that are multiples of {_MULTIPLE}"
        raise no_such(name, spec, limit, "pad the workload to such extents, or measure ours alone")
