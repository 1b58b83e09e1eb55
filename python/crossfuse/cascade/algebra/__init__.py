"""The algebra of cascades: a `Cascade` becomes a `Derivation`, or is refused with the reason.

Sympy only: nothing here but the explanation of a packaged cascade needs TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Cascade, Derivation

__all__ = ["derive"]


def derive(cascade: Cascade) -> Derivation:
    """Derive how a cascade streams.

    Parameters
    ----------
    cascade : Cascade
        Reductions over one axis, from `crossfuse.cascade.detect.detect` or written by hand.

    Returns
    -------
    Derivation
        What is kept from element to element, how it is corrected, and how two states merge.

    Raises
    ------
    CascadeRefused
        If a stage's term is no finite sum of products, or a sign cannot be proved; with the stage.

    Examples
    --------
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> [each.name for each in derive(detect(func)[0].cascade).slots]
    ['m', 's']
    """
    from crossfuse.cascade.algebra.stages import derive as run

    return run(cascade)
