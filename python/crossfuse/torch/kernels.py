"""Scheduled functions as kernels that torch calls, and such kernels from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from crossfuse.cache import Entry, shelf
from crossfuse.cache.keys import package_hash
from crossfuse.files import scratch
from crossfuse.hardware import Device
from crossfuse.schema import Extent, FileName
from crossfuse.torch.operator import FusedKernel, offer

if TYPE_CHECKING:
    from tvm.ir import GlobalVar

    from crossfuse.relax.chains.replace import Replacement
    from crossfuse.runtime.artefact import Artefact


@dataclass(frozen=True)
class KeptKernel:
    """A kernel of ``crossfuse::run`` that the cache has.

    Attributes
    ----------
    key : str
        What the operator knows it by.
    kept_as : str
        Key of its library in the cache; empty for functions on the CPU, which are not kept.
    name : str
        Of the function.
    shape : tuple[int, ...]
        Of the output.
    dtype : str
        Of the output.
    """

    key: str
    kept_as: str
    name: Annotated[str, FileName]
    shape: tuple[Extent, ...]
    dtype: str


def offer_kernels(
    replacements: Mapping[Any, Replacement], mod: Mapping[Any, Any], target: Device, cpu: bool
) -> dict[GlobalVar, KeptKernel]:
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
    dict[GlobalVar, KeptKernel]
        Their keys, and where they are kept.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        See `crossfuse.runtime.build_library`.
    """
    calls = {each.function: each for each in replacements.values()}
    functions = {name: mod[name] for name in calls}
    made = kernels_of({str(each.name_hint): func for each, func in functions.items()}, target, cpu)
    found = {}
    for name, call in calls.items():
        hint = str(name.name_hint)
        # Inductor keeps graphs with this key: another release of ours must never find them.
        text = package_hash() + str(mod[name].script())
        key = f"{hint}-{'cpu' if cpu else target.name}-{sha256(text.encode()).hexdigest()[:16]}"
        library = "" if cpu else _library_key(mod[name], target, hint)
        found[name] = KeptKernel(key, library, hint, tuple(call.shape), call.dtype)
        _offer(found[name], made[hint])
    return found


def offer_kept(kernels: tuple[KeptKernel, ...], entries: Mapping[str, Entry] | None = None) -> bool:
    """Make kernels known to ``crossfuse::run`` from their libraries, without TVM.

    Parameters
    ----------
    kernels : tuple[KeptKernel, ...]
        The kernels.
    entries : Mapping[str, Entry], optional
        Libraries by key; if not given, those of the cache.

    Returns
    -------
    bool
        Whether all are there; none is offered if not.

    Raises
    ------
    ArtefactRefused
        If one does not fit the GPU.
    """
    from crossfuse.runtime import load
    from crossfuse.runtime.kept import LIBRARIES, written

    def kept(key: str, path: Path) -> Artefact | None:
        if entries is None:
            return shelf(LIBRARIES.name).read(key, partial(written, LIBRARIES, path))
        return written(LIBRARIES, path, entries[key]) if key in entries else None

    runs = []
    with scratch() as folder:
        for each in kernels:
            found = kept(each.kept_as, folder / f"{each.name}.so")
            if found is None:
                return False
            runs.append(load(found.shared_object).run)
    for each, run in zip(kernels, runs, strict=True):
        _offer(each, run)
    return True


def kernels_of(
    functions: Mapping[str, Any], target: Device, cpu: bool
) -> dict[str, Callable[..., torch.Tensor]]:
    """Build functions, see `offer_kernels`; what makes the output of the inputs, by name."""
    if cpu:
        from crossfuse.emulate.llvm import SequentialFunction
        from crossfuse.emulate.serialise import serialise

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


def _library_key(func: Any, target: Device, name: str) -> str:
    from crossfuse.relax.build_kernels import build_key
    from crossfuse.runtime.kept import LIBRARIES

    return build_key(LIBRARIES, func, target, name)


def _offer(kernel: KeptKernel, run: Callable[..., torch.Tensor]) -> None:
    offer(FusedKernel(kernel.key, kernel.shape, getattr(torch, kernel.dtype), run))


def _of_tensors(run: Callable[..., dict[str, Any]]) -> Callable[..., torch.Tensor]:
    """A function of numpy arrays as one of torch tensors."""
    from crossfuse.runtime.tensors import to_numpy, to_torch

    def apply(*inputs: torch.Tensor) -> torch.Tensor:
        (output,) = run([to_numpy(each) for each in inputs]).values()
        result: torch.Tensor = to_torch(output)
        return result

    return apply
