"""Kernels of ours in PyTorch: the backend of ``torch.compile``, and MLPs without it.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Ahead": "ahead",
    "Backend": "backend",
    "Connection": "rank_sums",
    "Replaced": "mlps",
    "Report": "report",
    "all_reduce": "rank_sums",
    "compile_ahead": "ahead",
    "connect_ranks": "rank_sums",
    "crossfuse": "backend",
    "replace_mlp": "mlps",
    "reports": "report",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
