"""Converters of aten operators for TVM's importer: what it has otherwise, or not at all.

Each is a function of a node and the importer. TVM's own leave out arguments that some operators
have, such as ``alpha`` of sums and the bound of ``clamp_max``, and compute something else then.
"""

from __future__ import annotations

from crossfuse.relax.converters.activations import ACTIVATIONS, NEAR_ZERO
from crossfuse.relax.converters.arithmetic import ARITHMETIC
from crossfuse.relax.converters.layers import LAYERS, PRODUCTS
from crossfuse.relax.converters.places import ORDER, PLACES

#: By the name of the operator, as ``from_exported_program`` takes them.
CONVERTERS = {**ARITHMETIC, **ACTIVATIONS, **PRODUCTS, **LAYERS, **PLACES, **ORDER, **NEAR_ZERO}
