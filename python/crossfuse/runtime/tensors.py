"""Tensors of torch as arrays of numpy and back; types that numpy lacks travel as bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse.workload.dtypes import FLOAT_TYPES

if TYPE_CHECKING:
    import numpy as np
    import torch


def is_torch(value: Any) -> bool:
    """Whether a value is a tensor of torch, which is not imported for it."""
    return type(value).__module__.startswith("torch")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View a torch tensor as a numpy array, copying only what is not on the CPU or not contiguous.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any type that numpy or ml_dtypes has.

    Returns
    -------
    numpy.ndarray
        Row-major.
    """
    import torch

    there = tensor.detach().cpu().contiguous()
    name = str(there.dtype).removeprefix("torch.")
    if _travels_as_bits(name):
        bits = there.view(torch.int16 if there.itemsize == 2 else torch.uint8)
        return bits.numpy().view(FLOAT_TYPES[name].numpy)
    return there.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """View a numpy array as a torch tensor.

    Parameters
    ----------
    array : numpy.ndarray
        Of any floating type of ml_dtypes or numpy.

    Returns
    -------
    torch.Tensor
        On the CPU.
    """
    import torch

    name = str(array.dtype)
    if _travels_as_bits(name):
        return torch.from_numpy(as_bits(array)).view(getattr(torch, name))
    return torch.from_numpy(array)


def as_bits(array: np.ndarray) -> np.ndarray:
    """An array of a type of ml_dtypes as integers of its size; others as they are."""
    if not _travels_as_bits(str(array.dtype)):
        return array
    return array.view("int16" if array.dtype.itemsize == 2 else "uint8")


def from_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """What `as_bits` was given, of its type."""
    return array.view(FLOAT_TYPES[dtype].numpy) if _travels_as_bits(dtype) else array


def _travels_as_bits(name: str) -> bool:
    return name == "bfloat16" or name.startswith("float8")
