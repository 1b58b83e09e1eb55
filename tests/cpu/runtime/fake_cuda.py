"""Tensors that claim to lie on a GPU, for checks that happen before anything is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi

from crossfuse.runtime.kernel import DLManagedTensor, _dl_tensor, capsule_of

KDL_CUDA = 2


class _Exporter:
    """Speaks DLPack for host memory and says that it is a GPU's."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        tensor = _dl_tensor(array)
        tensor.device_type, tensor.device_id = KDL_CUDA, device
        self.keep = (array, tensor)
        self.managed = DLManagedTensor(tensor, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, self.managed.tensor.device_id

    def __dlpack__(self, **options: object) -> Any:
        return capsule_of(self.managed)


_alive: list[_Exporter] = []


def aligned(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """Zeros of float32 that start `offset` bytes past a multiple of 256."""
    count = int(np.prod(shape))
    store = np.zeros(4 * count + 512, np.uint8)
    start = -store.ctypes.data % 256 + offset
    return store[start : start + 4 * count].view(np.float32).reshape(shape)


def on_gpu(array: np.ndarray, device: int = 0) -> tvm_ffi.Tensor:
    """Wrap the memory of `array` as a tensor of ``cuda:device``."""
    exporter = _Exporter(array, device)
    _alive.append(exporter)
    return tvm_ffi.from_dlpack(exporter)
