"""Who fills the stages of a CTA's ring, and so has to hear that one is empty.

CTAs that share a tile fill stages of one another. All phases go round one ring, so what is loaded
next into a stage may belong to the next phase, where more CTAs share:

```
phase 0, A is not shared          phase 1, hidden is shared by CTAs 0 and 8
CTA 0 multiplies stage 3    <--   CTA 8 loads its half of a tile into stage 3 of both
```

CTA 8 must have heard of the stage from CTA 0 in phase 0 already.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from crossfuse.lower.hopper.plan.operand import Operand
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.program.tile_program import TileProgram

#: Places in the cluster; CTAs that differ in these alone fill stages of one another.
Fillers = tuple[Place, ...]


def fillers_of(
    phases: Iterable[tuple[TileProgram, tuple[Operand, ...]]],
) -> tuple[Fillers, ...]:
    """Say for each phase who fills a stage in it or in a later one.

    Parameters
    ----------
    phases : Iterable[tuple[TileProgram, tuple[Operand, ...]]]
        What each loads into the ring.

    Returns
    -------
    tuple[tuple[Place, ...], ...]
        Places of each phase's own cluster. The first phase has the most.
    """
    axes: set[str] = set()
    found: list[Fillers] = []
    for program, operands in reversed(tuple(phases)):
        axes |= {place.tag for operand in operands for place in operand.shared_by}
        found.append(tuple(place for place in program.cluster if place.tag in axes))
    return tuple(reversed(found))


def count(fillers: Fillers) -> int:
    """CTAs that fill a stage."""
    return prod(each.extent for each in fillers)
