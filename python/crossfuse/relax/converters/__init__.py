"""Converters of aten operators for TVM's importer, where it has none or a wrong one.

Each is a function of a node and the importer. TVM's own ignore arguments of some operators, such as
``alpha`` of sums and the bound of ``clamp_max``, and compute something else then.
"""

from __future__ import annotations

from crossfuse.relax.converters.arithmetic import ACTIVATIONS, ARITHMETIC, GRADIENTS, REMAINDERS
from crossfuse.relax.converters.layers import LAYERS
from crossfuse.relax.converters.places import PLACES

#: By the name of the operator, as ``from_exported_program`` takes them.
CONVERTERS = {**ARITHMETIC, **ACTIVATIONS, **GRADIENTS, **LAYERS, **PLACES, **REMAINDERS}
