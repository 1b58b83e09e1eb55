"""The algebra of cascades: a `Cascade` becomes a `Derivation`, or is refused with the reason.

Sympy only: nothing here but the explanation of a packaged cascade needs TVM.
"""

from crossfuse.cascade.algebra.stages import derive

__all__ = ["derive"]
