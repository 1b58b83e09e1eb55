"""The operator ``crossfuse::run``: one of our kernels in a graph of torch.

Kernels are known by a key, so that one operator stands for all of them: graphs, and the caches of
those who compile them, hold the key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from crossfuse.errors import ArtefactRefused, refuse


@dataclass(frozen=True)
class FusedKernel:
    """What stands behind a key.

    Attributes
    ----------
    key : str
        Name, and hash of the function.
    shape : tuple[int, ...]
        Of the output.
    dtype : torch.dtype
        Of the output.
    run : Callable
        Makes the output of the inputs.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    run: Callable[..., torch.Tensor]


_KERNELS: dict[str, FusedKernel] = {}


def offer(kernel: FusedKernel) -> None:
    """Make a kernel known to ``crossfuse::run``; one of the same key computes the same."""
    define()
    _KERNELS[kernel.key] = kernel


@lru_cache(maxsize=1)
def define() -> torch.library.Library:
    """Define the operator, once in a process; it is there as long as what is returned."""
    library = torch.library.Library("crossfuse", "DEF")
    library.define("run(Tensor[] inputs, str kernel) -> Tensor")
    for device in ("CUDA", "CPU"):
        library.impl("run", _run, device)
    torch.library.register_fake("crossfuse::run", _fake, lib=library)
    return library


def _run(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    return _known(key).run(*inputs)


def _fake(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    kernel = _known(key)
    return inputs[0].new_empty(kernel.shape, dtype=kernel.dtype)


def _known(key: str) -> FusedKernel:
    try:
        return _KERNELS[key]
    except KeyError:
        raise refuse(
            ArtefactRefused,
            "torch-operator",
            "crossfuse::run",
            found=f"the key '{key}'",
            limit="kernels that this process compiled or loaded",
            instead="compile the model again in this process",
        ) from None
