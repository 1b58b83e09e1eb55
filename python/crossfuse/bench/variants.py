"""Every way to compute a workload on torch CUDA tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crossfuse.bench.convolution import eager_chain
from crossfuse.bench.job import OWN
from crossfuse.bench.ours import fused, unfused
from crossfuse.bench.scaled_mm import scaled_mm
from crossfuse.bench.variant import Variant, no_such, pack_apart
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.spec import WorkloadSpec

_TORCH_TYPES = ("float16", "bfloat16", "float32")


def make(name: str, spec: WorkloadSpec, device: str = "cuda") -> Variant:
    """Build one way to compute a workload.

    Parameters
    ----------
    name : str
        A key of `crossfuse.bench.job.VARIANTS`.
    spec : WorkloadSpec
        What is computed.
    device : str
        Where buffers of our kernels are made.

    Returns
    -------
    Variant
        Compiled as far as it can be before the first call.

    Raises
    ------
    WorkloadRefused, ScheduleRefused, LoweringRefused
        Where there is no such way for this workload.
    """
    if name in OWN:
        return fused(name, spec, device)
    if name == "unfused":
        return unfused(spec, device)
    if name in ("scaled-mm", "scaled-mm-fast"):
        return scaled_mm(name, spec, device, fast=name == "scaled-mm-fast")
    _check_torch(name, spec)
    if name in ("eager", "eager-apart"):
        return eager(spec, together=name == "eager")
    return _compiled(spec, {"compile": None, "autotune": "max-autotune-no-cudagraphs"}[name])


def eager(spec: WorkloadSpec, *, together: bool) -> Variant:
    """Torch's own operators, one after another.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.
    together : bool
        Whether gate and up of a gated FFN are one matrix and one product.

    Returns
    -------
    Variant
        Without gate and up both are the same.
    """
    if isinstance(spec, ConvChainSpec):
        return eager_chain(spec)
    import torch

    from crossfuse.workload.torch_modules import activation

    act = (lambda x: x) if spec.act == "identity" else activation(spec.act)
    by_rows = spec.weights == "nk"
    product = torch.nn.functional.linear if by_rows else torch.matmul

    def single(a: Any, b: Any) -> Any:
        return act(product(a, b))

    def chain(a: Any, b: Any, d: Any) -> Any:
        return product(act(product(a, b)), d)

    def apart(a: Any, gate: Any, up: Any, d: Any) -> Any:
        return product(act(product(a, gate)) * product(a, up), d)

    def concatenated(a: Any, both: Any, d: Any) -> Any:
        gate, up = product(a, both).chunk(2, dim=-1)
        return product(act(gate) * up, d)

    def pack_both(weights: Mapping[str, Any]) -> tuple[Any, ...]:
        both = torch.cat([weights["B_gate"], weights["B_up"]], dim=0 if by_rows else 1)
        return both, weights["D"].clone()

    if spec.gated and together:
        return Variant(pack_both, concatenated, "gate and up concatenated")
    if spec.gated:
        return Variant(pack_apart, apart, "gate and up apart")
    return Variant(pack_apart, chain if spec.L else single)


def _compiled(spec: WorkloadSpec, mode: str | None) -> Variant:
    import torch

    plain = eager(spec, together=True)
    return replace(plain, call=torch.compile(plain.call, mode=mode, dynamic=False))


def _check_torch(name: str, spec: WorkloadSpec) -> None:
    if spec.combine != "sum":
        raise no_such(name, spec, "sums, the products of torch", "measure ours alone")
    if spec.dtype not in _TORCH_TYPES or spec.out != spec.dtype:
        limit = f"one type for inputs and output, of {', '.join(_TORCH_TYPES)}"
        eight_bits = spec.dtype.startswith("float8")
        other = "scaled-mm" if eight_bits else "a workload of one type"
        raise no_such(name, spec, limit, f"measure ours alone, or {other}")
