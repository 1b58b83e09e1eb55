"""The algebra of cascades: a `Cascade` becomes a `Derivation`, or is refused with the reason.

Sympy only; nothing here needs TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.spec import Cascade

__all__ = ["derive"]


def derive(cascade: Cascade) -> Derivation:
    """Derive how a cascade streams; see `crossfuse.cascade.algebra.derive.derive`."""
    from crossfuse.cascade.algebra.deriving import derive as run

    return run(cascade)
