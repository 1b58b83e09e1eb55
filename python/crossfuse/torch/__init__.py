"""Kernels of ours in PyTorch: the backend of ``torch.compile``, and MLPs without it.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Ahead": "ahead",
    "Backend": "backend",
    "Replaced": "mlps",
    "Report": "report",
    "compile_ahead": "ahead",
    "crossfuse": "backend",
    "replace_mlp": "mlps",
    "reports": "report",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
