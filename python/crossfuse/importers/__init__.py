"""Models of any framework as Relax modules, weights kept apart.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {"import_nn": "frontend_nn", "import_onnx": "from_onnx", "read_model": "read"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
