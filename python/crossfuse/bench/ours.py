"""Our own kernels as variants of a workload."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crossfuse import hardware
from crossfuse.bench.job import OF_MODELS, OURS, OWN, Variant, no_such
from crossfuse.planner.families.registry import STATE_PLACES
from crossfuse.workload.cascade_spec import (
    CascadeSpec,
    LayerNorm,
    LayerNormFfn,
    Norm,
    NormFfn,
    RmsNorm,
)
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from crossfuse.compiler import Compiled
    from crossfuse.runtime import LoadedKernel, Manifest


def fused(name: str, spec: WorkloadSpec, device: str) -> Variant:
    """Our fused kernel as a variant, with the placement of the intermediate that its name says.

    Names are keys of `crossfuse.bench.job.OWN`. It is refused where there is no such kernel, or no
    intermediate to place.
    """
    if name in OF_MODELS:
        raise no_such(name, spec, "models", "measure ours")
    placement = OWN[name]
    if placement is not None and not spec.L:
        limit = "a workload of two products, which has an intermediate to place"
        raise no_such(name, spec, limit, "measure ours")
    return _kernel(spec, device, placement)


def loaded(kernel: LoadedKernel, output: tuple[int, ...], dtype: str, device: str) -> Variant:
    """A variant of a kernel that has been compiled before, such as on another machine.

    The kernel takes the inputs of the workload in order, then its output.
    """
    import torch

    result = torch.empty(output, dtype=getattr(torch, dtype), device=device)

    def call(*inputs: Any) -> Any:
        kernel(*inputs, result)
        return result

    return Variant(call, note_of(kernel.manifest), kernel.manifest.resources)


def returning(kernel: LoadedKernel) -> Variant:
    """A variant of a kernel that makes its outputs anew with each call, as those of cascades do."""
    return Variant(kernel.run, note_of(kernel.manifest), kernel.manifest.resources)


def fused_cascade(name: str, spec: CascadeSpec) -> Variant:
    """Our kernel of a cascade, its states placed as the name says; refused where there is none."""
    if not has_cascade(name):
        raise no_such(name, spec, "a chain, which has an intermediate to place", "measure ours")
    return returning(compile_kernel(spec, OWN[name], hardware.device().name).kernel)


def norm_then_chain(spec: CascadeSpec) -> Variant:
    """A norm and the feed-forward block behind it by two kernels of ours; others are refused."""
    if not isinstance(spec, NormFfn):
        limit = "a norm and a feed-forward block, which are kernels of their own too"
        raise no_such("unfused", spec, limit, "leave unfused out")
    target = hardware.device().name
    norm, chain = (
        returning(compile_kernel(each, None, target).kernel) for each in norm_and_chain(spec)
    )
    count = len(spec.parameters)

    def call(x: Any, *others: Any) -> Any:
        rows = norm.call(x, *others[:count])
        return chain.call(rows, *others[count:], *((x,) if spec.residual else ()))

    return Variant(call, f"{norm.note}; {chain.note}", (*norm.resources, *chain.resources))


def unfused(spec: WorkloadSpec, device: str) -> Variant:
    """Each product a kernel of ours with its activation, one after another; the gating is torch's.

    Single products and convolutions are refused, a residual behind gate and up, and what a product
    has no kernel for.
    """
    import torch

    if spec.kind == "gemm":
        raise no_such("unfused", spec, "a workload of two products", "leave unfused out")
    if isinstance(spec, ConvChainSpec):
        raise no_such("unfused", spec, "a chain of matrix products", "measure ours-global")
    if spec.residual and not spec.L:
        raise no_such("unfused", spec, "a residual behind a product", "leave unfused out")
    first, *others = _products(spec)
    gate = _kernel(first, device)
    up, down = (None if each is None else _kernel(each, device) for each in others)
    names = [each.name for each in spec.operands[1:]]
    suffix = "_gate" if spec.gated else ""
    # Where each kernel finds its inputs, after its left operand, among the tensors of a set.
    own_gate = _inputs(first, names, "B" + suffix, "0" + suffix)
    beside, second = others
    own_up = [] if beside is None else _inputs(beside, names, "B_up", "0_up")
    own_down = [] if second is None else _inputs(second, names, "D", "1")

    def call(a: Any, *tensors: Any) -> Any:
        hidden = gate.call(a, *(tensors[each] for each in own_gate))
        if up is not None:
            torch.mul(hidden, up.call(a, *(tensors[each] for each in own_up)), out=hidden)
        return hidden if down is None else down.call(hidden, *(tensors[e] for e in own_down))

    every = [each for each in (gate, down, up) if each is not None]
    resources = tuple(one for each in every for one in each.resources)
    return Variant(call, "; ".join(each.note for each in every[:2]), resources)


def _inputs(part: WorkloadSpec, names: list[str], weight: str, number: str) -> list[int]:
    """Places of the inputs of one product of a chain among those of the chain."""
    renamed = {"B": weight, "scale0": f"scale{number}", "bias0": f"bias{number}"}
    return [names.index(renamed.get(each.name, each.name)) for each in part.operands[1:]]


def kernels(
    name: str, spec: WorkloadSpec | CascadeSpec
) -> tuple[tuple[WorkloadSpec | CascadeSpec, str | None], ...]:
    """What a variant compiles, each with the placement of its intermediate; nothing for others."""
    if isinstance(spec, NormFfn) and name == "unfused":
        return tuple((each, None) for each in norm_and_chain(spec))
    if isinstance(spec, CascadeSpec):
        return ((spec, OWN[name]),) if has_cascade(name) else ()
    if name in OWN and name not in OF_MODELS and (spec.L or OWN[name] is None):
        return ((spec, OWN[name]),)
    if name != "unfused" or spec.kind == "gemm" or isinstance(spec, ConvChainSpec):
        return ()
    return tuple((each, None) for each in _products(spec) if each is not None)


def norm_and_chain(spec: NormFfn) -> tuple[Norm, WorkloadSpec]:
    """A norm and the feed-forward block behind it as workloads of their own."""
    made = LayerNorm if isinstance(spec, LayerNormFfn) else RmsNorm
    norm = made(rows=spec.tokens, cols=spec.K, dtype=spec.dtype)
    chain = WorkloadSpec(
        "gated_ffn" if spec.gated else "gemm_chain",
        M=spec.tokens,
        K=spec.K,
        N=spec.N,
        L=spec.L,
        dtype=spec.dtype,
        act=spec.act,
        weights="nk",
        out=spec.out,
        residual="in" if spec.residual else "",
    )
    return norm, chain


def has_cascade(name: str) -> bool:
    """Whether a variant is a kernel of a cascade: ours, or ours with its states placed."""
    return name == OURS or OWN.get(name) in STATE_PLACES


@functools.cache
def compile_kernel(
    spec: WorkloadSpec | CascadeSpec,
    placement: str | None,
    target: str,
    directory: str | None = None,
) -> Compiled:
    """Compile a workload as a user would, once in a process.

    Without a placement the planner chooses where the intermediate lives.
    """
    from crossfuse import compiler

    options = {} if placement is None else {"placement": placement}
    return compiler.compile(spec, target=target, directory=directory, **options)


def _products(spec: WorkloadSpec) -> tuple[WorkloadSpec, WorkloadSpec | None, WorkloadSpec | None]:
    """The products of a chain as workloads: gate, up (of a gated one), and down (of a chain)."""
    bias, scale = (
        {place: "last" if place in each.split("+") else "" for place in ("first", "last")}
        for each in (spec.bias, spec.scale)
    )
    place = "first" if spec.L else "last"
    gate = replace(
        spec,
        kind="gemm",
        L=0,
        out=spec.dtype,
        bias=bias[place],
        scale=scale[place],
        residual="",
    )
    up = replace(gate, act="identity") if spec.gated else None
    if not spec.L:
        return gate, up, None
    down = replace(
        spec,
        kind="gemm",
        K=spec.N,
        N=spec.L,
        L=0,
        act="identity",
        bias=bias["last"],
        scale=scale["last"],
    )
    return gate, up, down


def _kernel(spec: WorkloadSpec, device: str, placement: str | None = None) -> Variant:
    compiled = compile_kernel(spec, placement, hardware.device().name)
    return loaded(compiled.kernel, spec.output, spec.out, device)


def note_of(manifest: Manifest) -> str:
    """Grid and cluster of each launch, and the resources that ptxas gave its kernel."""
    usage = {each.kernel: each.summary for each in manifest.resources}
    launches = []
    for each in manifest.launches:
        grid, cluster = ("x".join(map(str, extents)) for extents in (each.grid, each.cluster))
        facts = f" ({usage[each.symbol]})" if each.symbol in usage else ""
        launches.append(f"{each.symbol} grid {grid} cluster {cluster}{facts}")
    return ", ".join(launches)
