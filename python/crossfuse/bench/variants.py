"""Finds a variant of a workload by its name."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.bench.eager import eager, scaled_mm
from crossfuse.bench.job import COMPILE_MODES, OWN
from crossfuse.bench.ours import fused, fused_cascade, norm_then_chain, unfused
from crossfuse.bench.variant import Variant, no_such
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec

_TORCH_TYPES = ("float16", "bfloat16", "float32")


def make(name: str, spec: WorkloadSpec | CascadeSpec, device: str = "cuda") -> Variant:
    """Build a variant of a workload, compiled as far as it can be before the first call.

    `name` is a key of `crossfuse.bench.job.VARIANTS`; buffers of our kernels are made on `device`.
    What the workload has no such variant for is refused.
    """
    if isinstance(spec, CascadeSpec):
        return _of_cascade(name, spec)
    if name in OWN:
        return fused(name, spec, device)
    if name == "unfused":
        return unfused(spec, device)
    if name in ("scaled-mm", "scaled-mm-fast"):
        return scaled_mm(name, spec, device, fast=name == "scaled-mm-fast")
    _check_torch(name, spec)
    if name in ("eager", "eager-apart"):
        return eager(spec, together=name == "eager")
    import torch

    plain = eager(spec, together=True)
    compiled = torch.compile(plain.call, mode=COMPILE_MODES[name], dynamic=False)
    return replace(plain, call=compiled)


def _of_cascade(name: str, spec: CascadeSpec) -> Variant:
    from crossfuse.bench.cascade_torch import formula

    if name == "unfused":
        return norm_then_chain(spec)
    return fused_cascade(name, spec) if name in OWN else Variant(formula(name, spec))


def _check_torch(name: str, spec: WorkloadSpec) -> None:
    if spec.combine != "sum":
        raise no_such(name, spec, "sums, the products of torch", "measure ours alone")
    if spec.dtype not in _TORCH_TYPES or spec.out != spec.dtype:
        limit = f"one type for inputs and output, of {', '.join(_TORCH_TYPES)}"
        eight_bits = spec.dtype.startswith("float8")
        other = "scaled-mm" if eight_bits else "a workload of one type"
        raise no_such(name, spec, limit, f"measure ours alone, or {other}")
