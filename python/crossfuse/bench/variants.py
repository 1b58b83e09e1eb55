"""Every way to compute a workload on torch CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.workload.spec import WorkloadSpec

_TORCH_TYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload.

    Attributes
    ----------
    pack : Callable
        Makes of the weights by name the tensors of one set, as `call` takes them.
    call : Callable
        Launches the computation on the current stream: ``call(A, *tensors of a set)`` gives the
        output, which a later call may overwrite.
    note : str
        What is run, for the record.
    """

    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    call: Callable[..., Any]
    note: str = ""

    def bind(self, a: Any, weights: tuple[Any, ...]) -> Callable[[], Any]:
        """The computation on one set of weights."""
        return lambda: self.call(a, *weights)


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
    if name == "ours":
        return _fused(spec, device)
    if name == "unfused":
        return _unfused(spec, device)
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
        return Variant(_pack_apart, apart, "gate and up apart")
    return Variant(_pack_apart, chain if spec.L else single)


def _compiled(spec: WorkloadSpec, mode: str | None) -> Variant:
    import torch

    plain = eager(spec, together=True)
    return replace(plain, call=torch.compile(plain.call, mode=mode, dynamic=False))


def _fused(spec: WorkloadSpec, device: str) -> Variant:
    kernel, output, note = _kernel(spec, device)

    def call(a: Any, *weights: Any) -> Any:
        kernel(a, *weights, output)
        return output

    return Variant(_pack_apart, call, note)


def _unfused(spec: WorkloadSpec, device: str) -> Variant:
    """Each product a kernel of ours with its activation; the gating is torch's."""
    import torch

    if spec.kind == "gemm":
        raise _no_such("unfused", spec, "a workload of two products", "leave unfused out")
    first = replace(spec, kind="gemm", L=0, out=spec.dtype)
    second = replace(spec, kind="gemm", K=spec.N, N=spec.L, L=0, act="identity")
    gate, hidden, note = _kernel(first, device)
    down, output, last_note = _kernel(second, device)
    note = f"{note}; {last_note}"

    def chain(a: Any, b: Any, d: Any) -> Any:
        gate(a, b, hidden)
        down(hidden, d, output)
        return output

    if not spec.gated:
        return Variant(_pack_apart, chain, note)
    up, raised, _ = _kernel(replace(first, act="identity"), device)

    def gated(a: Any, b_gate: Any, b_up: Any, d: Any) -> Any:
        gate(a, b_gate, hidden)
        up(a, b_up, raised)
        torch.mul(hidden, raised, out=hidden)
        down(hidden, d, output)
        return output

    return Variant(_pack_apart, gated, note)


def _kernel(spec: WorkloadSpec, device: str) -> tuple[Any, Any, str]:
    """A kernel of ours, its output buffer, and its launches in words."""
    import torch

    from crossfuse.compiler import compile as compile_source

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    target = "nvidia-h200" if "H200" in name else "nvidia-h100"
    compiled = compile_source(spec, target=target, rule="tensor")
    launches = [
        f"{each.symbol} grid {'x'.join(map(str, each.grid))} "
        f"cluster {'x'.join(map(str, each.cluster))}"
        for each in compiled.lowered.image.launches
    ]
    output = torch.empty(spec.output, dtype=getattr(torch, spec.out), device=device)
    return compiled.kernel, output, ", ".join(launches)


def _pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(each.clone() for each in weights.values())


def _check_torch(name: str, spec: WorkloadSpec) -> None:
    if spec.combine != "sum":
        raise _no_such(name, spec, "sums, the products of torch", "measure ours alone")
    if spec.dtype not in _TORCH_TYPES or spec.out != spec.dtype:
        limit = f"one type for inputs and output, of {', '.join(_TORCH_TYPES)}"
        raise _no_such(name, spec, limit, "measure ours alone, or a workload of one type")


def _no_such(name: str, spec: WorkloadSpec, limit: str, instead: str) -> Exception:
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)
