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
    """A module's weights in order, copied to `device` at the first call.

    `copies` caches them by device, and is extended here.
    """
    if device not in copies:
        copies[device] = [to_torch(array).to(device) for array in params.values()]
    return copies[device]
