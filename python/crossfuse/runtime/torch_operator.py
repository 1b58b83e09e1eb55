"""Operators of torch inside of a model that TVM's virtual machine runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from crossfuse.schema import parse

#: Of the function that the machine calls with what is called, as JSON, and its tensors.
NAME = "crossfuse.torch_operator"
_PURE = "relax.call_pure_packed"


def register() -> None:
    """Register the function that the machine calls; torch is imported at the first call."""
    from tvm_ffi import register_global_func

    register_global_func(NAME, _call, override=True)


def operators_in(module: Any) -> tuple[str, ...]:
    """Names of the operators that a Relax module leaves to torch, each once."""
    from tvm import relax

    found: dict[str, None] = {}

    def visit(value: Any) -> None:
        if isinstance(value, relax.Call) and str(getattr(value.op, "name", "")) == _PURE:
            function, text, *_ = value.args
            if str(getattr(function, "global_symbol", "")) == NAME:
                found[parse(str(text.value))["operator"]] = None

    relax.analysis.post_order_visit(module["main"], visit)
    return tuple(found)


def _call(text: str, *tensors: Any) -> Any:
    """Run an operator on the stream that the machine launches on."""
    import torch
    import tvm

    call, given = parse(str(text)), [torch.from_dlpack(each) for each in tensors]
    on_gpu = any(each.is_cuda for each in given)
    stream = torch.cuda.stream(torch.cuda.default_stream(0)) if on_gpu else nullcontext()
    with torch.no_grad(), stream:
        found = _operator(call["operator"])(
            *_read(call["args"], given), **_read(call["kwargs"], given)
        )
        several = isinstance(found, (tuple, list))
        results = list(found) if several else [found]
        # Models that were stored by earlier releases name no types.
        for place, dtype in enumerate(call.get("types", ())):
            results[place] = results[place].to(getattr(torch, dtype))
        made = [tvm.runtime.from_dlpack(each.contiguous()) for each in results]
    return made if several else made[0]


def _operator(name: str) -> Any:
    """The overload named ``namespace.operator.overload``."""
    import torch

    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _read(value: Any, tensors: list[Any]) -> Any:
    """Decode an argument that `crossfuse.relax.converters.by_torch` encoded."""
    if isinstance(value, list):
        return [_read(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "named":
        return {key: _read(each, tensors) for key, each in inner.items()}
    if kind == "dtype":
        import torch

        return getattr(torch, inner)
    return tensors[inner]
