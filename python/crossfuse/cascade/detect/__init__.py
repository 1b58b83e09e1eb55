"""Finds cascades in functions: reductions that share an axis, and their terms.

Names, the order of blocks and equal extents mean nothing. Two reductions share their axis if they
read the same positions of a tensor, or if one uses the other's result of the same row and an output
reads what both reduce at one position, or one of them reads no tensor along the axis. A reduction
whose results are read *along* the axis (a score of attention, a logit of a router) is a producer of
elements, and no part of the cascade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfuse.calls import checked

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from crossfuse.cascade.site import Site


@checked
def detect(func: PrimFunc) -> tuple[Site, ...]:
    """Find the cascades of a function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form, unscheduled, with constant shapes: blocks that each write one buffer, or the
        two of an argmax or argmin. Its attribute ``crossfuse.nonnegative`` may name parameters that
        hold no negative number.

    Returns
    -------
    tuple[Site, ...]
        One for each set of reductions that share an axis, in program order: usually one. A site of
        a single stage is a plain reduction.

    Raises
    ------
    CascadeRefused
        If reductions depend on each other in another way; the reason, with block and buffer.

    Examples
    --------
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> [[stage.name for stage in site.cascade.stages] for site in detect(func)]
    [['m', 's']]
    """
    from crossfuse.cascade.detect.sites import find_sites

    return find_sites(func)
