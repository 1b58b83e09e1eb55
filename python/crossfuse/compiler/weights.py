"""A module's weights as tensors of the device that the kernel runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crossfuse.runtime.tensors import to_torch

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
