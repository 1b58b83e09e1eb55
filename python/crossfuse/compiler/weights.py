"""A module's weights as tensors of the device that the kernel runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def on_device(
    params: Mapping[str, np.ndarray], device: Any, copies: dict[Any, list[Any]]
) -> list[Any]:
    """Weights in order, copied to `device` at the first call.

    Parameters
    ----------
    params : Mapping[str, numpy.ndarray]
        Weights, as `crossfuse.relax.import_torch` gives them.
    device : torch.device
        Where they are needed.
    copies : dict
        Copies made so far, by device; extended here.

    Returns
    -------
    list[torch.Tensor]
        One tensor for each weight.
    """
    if device not in copies:
        copies[device] = [to_torch(array).to(device) for array in params.values()]
    return copies[device]


def to_torch(array: np.ndarray) -> Any:
    """View a numpy array as a torch tensor; types numpy lacks travel as bits.

    Parameters
    ----------
    array : numpy.ndarray
        Of any floating type of ml_dtypes or numpy.

    Returns
    -------
    torch.Tensor
        On the CPU.
    """
    import numpy as np
    import torch

    name = str(array.dtype)
    if name == "bfloat16" or name.startswith("float8"):
        bits = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)
