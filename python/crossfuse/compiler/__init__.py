"""The main job, end to end: a model or spec in, a checked and loadable kernel out.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Compiled": "compiled",
    "CompiledBins": "bins",
    "Source": "source",
    "Verdict": "checks",
    "check": "checks",
    "compile": "compiled",
    "compile_bins": "bins",
    "compile_model": "model",
    "CompiledModel": "model",
    "time_kernel": "measure",
    "read_source": "source",
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
