"""Kernels of ours in PyTorch: the backend of ``torch.compile``, and MLPs without it.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Ahead": "ahead",
    "Backend": "backend",
    "Connection": "ranks",
    "Replaced": "mlps",
    "Report": "report",
    "all_gather": "collectives",
    "all_gather_matmul": "rank_products",
    "all_reduce": "collectives",
    "compile_ahead": "ahead",
    "connect_ranks": "ranks",
    "crossfuse": "backend",
    "all_to_all": "collectives",
    "matmul_reduce_scatter": "rank_products",
    "reduce_scatter": "collectives",
    "replace_mlp": "mlps",
    "reports": "report",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
