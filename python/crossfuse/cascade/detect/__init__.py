"""Finds cascades in functions: reductions that share an axis, and their terms.

Names, the order of blocks and equal extents mean nothing. Two reductions share their axis if they
read the same positions of a tensor, or if one uses the other's result of the same row and an output
reads what both reduce at one position, or one of them reads no tensor along the axis. A reduction
whose results are read *along* the axis (a score of attention, a logit of a router) is a producer of
elements, and no part of the cascade.
"""

from __future__ import annotations

from crossfuse import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {"detect": "sites"})
