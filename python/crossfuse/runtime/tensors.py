"""Tensors of torch as arrays of numpy and back, and operators of torch inside a model of TVM."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from crossfuse.schema import parse
from crossfuse.workload.dtypes import FLOAT_TYPES

if TYPE_CHECKING:
    import numpy as np
    import torch


def is_torch(value: Any) -> bool:
    """Whether a value is a tensor of torch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View a torch tensor as a row-major numpy array.

    It is copied only from a GPU, or to make it contiguous.
    """
    import torch

    there = tensor.detach().cpu().contiguous().resolve_neg()
    name = str(there.dtype).removeprefix("torch.")
    if _travels_as_bits(name):
        bits = there.view(torch.int16 if there.itemsize == 2 else torch.uint8)
        return bits.numpy().view(FLOAT_TYPES[name].numpy)
    return there.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """View a numpy array, also of a floating type of ml_dtypes, as a torch tensor on the CPU."""
    import torch

    name = str(array.dtype)
    if _travels_as_bits(name):
        return torch.from_numpy(as_bits(array)).view(getattr(torch, name))
    return torch.from_numpy(array)


def as_bits(array: np.ndarray) -> np.ndarray:
    """Reinterpret an array of an ml_dtypes type as integers of its size; others are unchanged."""
    if not _travels_as_bits(str(array.dtype)):
        return array
    return array.view("int16" if array.dtype.itemsize == 2 else "uint8")


def from_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of `as_bits`."""
    return array.view(FLOAT_TYPES[dtype].numpy) if _travels_as_bits(dtype) else array


def _travels_as_bits(name: str) -> bool:
    return name == "bfloat16" or name.startswith("float8")


# Operators of torch inside of a model that TVM's virtual machine runs.


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
