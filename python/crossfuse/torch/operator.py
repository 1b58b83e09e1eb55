"""The operators ``crossfuse::run`` and ``run_rows``: kernels of ours in a graph of torch.

Kernels are known by a key, so that one operator stands for all of them: graphs, and the caches of
those who compile them, hold the key alone. ``run_rows`` has a kernel for each bin of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import library as registry

from crossfuse.errors import ArtefactRefused, refuse

_Kernel = TypeVar("_Kernel", "FusedKernel", "BinnedKernel")


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


@dataclass(frozen=True)
class BinnedKernel:
    """Kernels of one function for all numbers of rows.

    Attributes
    ----------
    key : str
        Name, and hash of the functions.
    columns, width : int
        Of the first input and of the output, both with a row for each row.
    dtype : torch.dtype
        Of the output.
    shapes : tuple[tuple[int, ...], ...]
        Extents of the inputs for kernels; -1 stands for the rows.
    bins : tuple[tuple[int, Callable | None], ...]
        The most rows, and what makes the output of the inputs; None where not to fuse is faster.
    eager : Callable
        What torch would compute, of the inputs as the graph has them and of sizes: for more rows
        than the last bin has.
    """

    key: str
    columns: int
    width: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    bins: tuple[tuple[int, Callable[..., torch.Tensor] | None], ...]
    eager: Callable[..., torch.Tensor]

    def rows(self, first: torch.Tensor) -> Any:
        """Rows of a call, by its first input."""
        columns, leading = 1, list(first.shape)
        while leading and columns != self.columns:
            columns *= leading.pop()
        return prod(leading)

    def run(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """The output, [rows, width]."""
        rows = self.rows(inputs[0])
        kernel = next((run for most, run in self.bins if rows <= most), None)
        if kernel is None or not rows:
            return self.eager(*inputs, *sizes).reshape(rows, self.width).contiguous()
        pairs = zip(inputs, self.shapes, strict=True)
        return kernel(*(each.reshape(shape) for each, shape in pairs))


_KERNELS: dict[str, FusedKernel | BinnedKernel] = {}
_DEFINING = Lock()


def offer(kernel: FusedKernel | BinnedKernel) -> None:
    """Make a kernel known to the operators; one of the same key computes the same."""
    define()
    _KERNELS[kernel.key] = kernel


def define() -> registry.Library:
    """Define the operators, once in a process; they are there as long as what is returned."""
    with _DEFINING:  # programs may be loaded by several threads
        return _defined()


@lru_cache(maxsize=1)
def _defined() -> registry.Library:
    made = registry.Library("crossfuse", "DEF")
    made.define("run(Tensor[] inputs, str kernel) -> Tensor")
    made.define("run_rows(Tensor[] inputs, SymInt[] sizes, str kernel) -> Tensor")
    for device in ("CUDA", "CPU"):
        made.impl("run", _run, device)
        made.impl("run_rows", _run_rows, device)
    registry.register_fake("crossfuse::run", _fake, lib=made)
    registry.register_fake("crossfuse::run_rows", _fake_rows, lib=made)
    return made


def _run(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    return _known(key, FusedKernel).run(*inputs)


def _fake(inputs: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    kernel = _known(key, FusedKernel)
    return inputs[0].new_empty(kernel.shape, dtype=kernel.dtype)


def _run_rows(inputs: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> torch.Tensor:
    return _known(key, BinnedKernel).run(inputs, sizes)


def _fake_rows(inputs: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> torch.Tensor:
    kernel = _known(key, BinnedKernel)
    return inputs[0].new_empty((kernel.rows(inputs[0]), kernel.width), dtype=kernel.dtype)


def _known(key: str, kind: type[_Kernel]) -> _Kernel:
    kernel = _KERNELS.get(key)
    if isinstance(kernel, kind):
        return kernel
    raise refuse(
        ArtefactRefused,
        "torch-operator",
        "crossfuse::run",
        found=f"the key '{key}'",
        limit="kernels that this process compiled or loaded",
        instead="compile the model again in this process",
    )
