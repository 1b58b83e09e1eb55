"""Scheduled functions as kernels that torch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import torch
from tvm.ir import GlobalVar

from crossfuse.hardware import Device
from crossfuse.relax.chains.replace import Replacement
from crossfuse.torch.operator import FusedKernel, offer


def offer_kernels(
    replacements: Mapping[Any, Replacement], mod: Mapping[Any, Any], target: Device, cpu: bool
) -> dict[GlobalVar, str]:
    """Build the functions that a graph calls, and make them known to ``crossfuse::run``.

    Parameters
    ----------
    replacements : Mapping[Any, Replacement]
        The calls.
    mod : tvm.IRModule | Mapping[GlobalVar, tvm.tirx.PrimFunc]
        With the functions.
    target : Device
        What to build for.
    cpu : bool
        Whether to run the scheduled functions on the CPU instead, one thread after the other.

    Returns
    -------
    dict[GlobalVar, str]
        Their keys.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        See `crossfuse.runtime.build_library`.
    """
    calls = {each.function: each for each in replacements.values()}
    functions = {name: mod[name] for name in calls}
    made = kernels_of({str(each.name_hint): func for each, func in functions.items()}, target, cpu)
    keys = {}
    for name, call in calls.items():
        text = mod[name].script()
        where = "cpu" if cpu else target.name
        keys[name] = f"{name.name_hint}-{where}-{sha256(text.encode()).hexdigest()[:16]}"
        dtype = getattr(torch, call.dtype)
        offer(FusedKernel(keys[name], call.shape, dtype, made[str(name.name_hint)]))
    return keys


def kernels_of(
    functions: Mapping[str, Any], target: Device, cpu: bool
) -> dict[str, Callable[..., torch.Tensor]]:
    """Build functions, see `offer_kernels`; what makes the output of the inputs, by name."""
    if cpu:
        from crossfuse.emulate.llvm import SequentialFunction, serialise

        return {
            name: _of_tensors(SequentialFunction(serialise(func), func))
            for name, func in functions.items()
        }
    from crossfuse.relax.build_kernels import built
    from crossfuse.runtime import load
    from crossfuse.runtime.kept import LIBRARIES

    libraries = built(LIBRARIES, functions, target)
    return {
        name: load(each.shared_object).run for name, each in zip(functions, libraries, strict=True)
    }


def _of_tensors(run: Callable[..., dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """A function of numpy arrays as one of torch tensors."""
    from crossfuse.compiler.weights import to_torch
    from crossfuse.relax.torch_import import to_numpy

    def apply(*inputs: torch.Tensor) -> torch.Tensor:
        (output,) = run([to_numpy(each) for each in inputs]).values()
        result: torch.Tensor = to_torch(output)
        return result

    return apply
