"""Tensors of torch as arrays of numpy and back; types that numpy lacks travel as bits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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
