"""Calls that allocate their outputs, with the inputs' row count and in the inputs' place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.lower.image import BufferSpec


class Callee(Protocol):
    """What is run: a kernel or a dispatch, called with inputs and outputs in buffer order."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Arguments in order."""

    def __call__(self, *arguments: Any, device: int = 0) -> None:
        """Write the outputs."""


def run_with_outputs(callee: Callee, inputs: Sequence[Any], device: int) -> Any:
    """Allocate the outputs in the framework and place of the first input, call, and return them.

    Outputs have as many rows as the first input with rows. `device` is the GPU that numpy arrays
    are copied to. Several outputs come as a tuple. Another number of inputs, no input at all, or a
    first one that is neither a torch tensor nor a numpy array raises `ArtefactRefused`.
    """
    wanted = [each for each in callee.buffers if not each.output]
    if len(inputs) != len(wanted) or not inputs:
        raise refuse(
            ArtefactRefused,
            "argument-count",
            f"run of {callee.name}",
            found=f"{len(inputs)} inputs",
            limit=f"{len(wanted)} ({', '.join(each.name for each in wanted)})",
            instead="pass the inputs alone, or call the kernel itself with its outputs",
        )
    rest = iter(inputs)
    arguments = [
        _empty_like(each, inputs[0], callee.name) if each.output else next(rest)
        for each in _buffers_of_call(callee.buffers, inputs)
    ]
    callee(*arguments, device=device)
    pairs = zip(callee.buffers, arguments, strict=True)
    outputs = tuple(argument for buffer, argument in pairs if buffer.output)
    return outputs[0] if len(outputs) == 1 else outputs


def is_numpy(value: Any) -> bool:
    """Whether a value is a numpy array; numpy is not imported for this."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _buffers_of_call(buffers: tuple[BufferSpec, ...], inputs: Sequence[Any]) -> list[BufferSpec]:
    """Buffers with the row count of the inputs; unchanged if none has rows to count."""
    wanted = [each for each in buffers if not each.output]
    given = [x for each, x in zip(wanted, inputs, strict=True) if each.rows]
    counts = (len(x) for x in given if getattr(x, "ndim", None))
    count = next(counts, None)
    return [each if count is None else each.with_rows(count) for each in buffers]


def _empty_like(buffer: BufferSpec, like: Any, name: str) -> Any:
    """Allocate an output of the kernel `name` in the framework of an input, where that lies."""
    if is_numpy(like):
        import ml_dtypes
        import numpy as np

        return np.empty(buffer.shape, getattr(ml_dtypes, buffer.dtype, buffer.dtype))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        dtype = getattr(torch, buffer.dtype)
        return torch.empty(buffer.shape, dtype=dtype, device=like.device)
    raise refuse(
        ArtefactRefused,
        "argument-kind",
        f"run of {name}",
        found=f"a first input of type {type(like).__name__}",
        limit="a torch tensor or a numpy array",
        instead="allocate the outputs and call the kernel itself",
    )
