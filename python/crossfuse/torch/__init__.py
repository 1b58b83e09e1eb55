"""Kernels of ours in PyTorch: the backend of ``torch.compile``, and MLPs without it.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Backend": "backend",
    "Replaced": "mlps",
    "Report": "report",
    "crossfuse": "backend",
    "replace_mlp": "mlps",
    "reports": "report",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
