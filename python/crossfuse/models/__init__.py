"""Models to evaluate whole networks with: random weights, real widths, any number of layers.

Names are loaded when first used, so that importing the package needs neither TVM nor torch.
"""

from __future__ import annotations

from crossfuse import lazy_names

_HOME = {
    "Built": "zoo",
    "ModelSpec": "spec",
    "build": "zoo",
    "cost": "zoo",
    "names_one": "spec",
    "parse": "spec",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
