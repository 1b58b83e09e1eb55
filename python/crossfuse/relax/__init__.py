"""Import of models: torch modules to Relax, Relax functions to workload functions.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
The function `crossfuse.relax.outline.outline` keeps its module's name free, hence is not listed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Argument": "outline",
    "BuildKernels": "build_kernels",
    "ChainOutcome": "chains.choice",
    "FuseCascades": "fuse_cascades",
    "FuseChains": "fuse_chains",
    "Imported": "torch_import",
    "Outcome": "fuse_cascades",
    "Outlined": "outline",
    "import_torch": "torch_import",
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
