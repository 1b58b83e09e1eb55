"""Variants of a workload by name: kernels of ours, and torch's own operators."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse import hardware
from crossfuse.bench.job import COMPILE_MODES, OF_MODELS, OURS, OWN, Variant, no_such
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
from crossfuse.workload.spec import WorkloadSpec, affine

if TYPE_CHECKING:
    from crossfuse.compiler import Compiled
    from crossfuse.runtime import LoadedKernel, Manifest

# Torch's own operators, one after another.

# Chains of convolutions by torch's own operators, which call cuDNN.


def eager_chain(spec: ConvChainSpec) -> Variant:
    """Two convolutions and the activation between them, one after another, in channels_last.

    A bias is a part of the convolution, unless a scale comes before it. Images are NHWC, weights as
    the spec stores them; those stored as [k, n] are brought into torch's order when a set is
    packed. Nothing else is copied.
    """
    from crossfuse.workload.torch_modules import activation

    act = activation(spec.act)
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

    return Variant(call, "conv2d in channels_last", pack=pack)


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

    act = activation(spec.act)
    every = [product(each) for each in spec.products]
    residual = place.get("residual")

    def activated(a: Any, tensors: tuple[Any, ...]) -> Any:
        gate = every[0](a, tensors)
        if not spec.gated:
            return act(gate)
        gate, up = gate.chunk(2, dim=-1) if joined else (gate, every[1](a, tensors))
        return act(gate) * up

    def call(a: Any, *tensors: Any) -> Any:
        output = activated(a, tensors)
        output = every[-1](output, tensors) if spec.L else output
        return output if residual is None else output + tensors[residual]

    if joined:
        return Variant(call, _NOTE + "concatenated", pack=partial(_pack_joined, spec))
    return Variant(call, _NOTE + "apart" if spec.gated else "")


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


# Products of 8-bit floats by cuBLASLt, as `torch._scaled_mm` calls it.

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
    act = activation(spec.act)

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
        product = act(product)
        return product if residual is None else product + residual

    note = f"torch._scaled_mm, scales of {'the workload' if spec.scale else 'one'}, "
    note += ("fast" if fast else "float32") + " accumulation"
    return Variant(call, note + ("" if spec.act == "identity" else f", then {spec.act}"), pack=pack)


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


# By name.

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
    from crossfuse.bench.cascades import formula

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


# Our own kernels as variants of a workload.


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
