"""Gradients of functions, as functions that gather.

Names are loaded when first used, so that importing the package needs no TVM.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {"Gradients": "differentiate", "gradients": "differentiate"}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
