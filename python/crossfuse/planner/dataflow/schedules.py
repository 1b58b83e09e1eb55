"""Loop schedules: which dims are laid out in space, and the order of those that are walked in time.

```
m n | l k      m and n are spatial: clusters stand along them, each with one tile of both
               l and k are temporal: a cluster walks them, l outside k
```

Spatial dims have no order, since their tiles exist side by side. Of d dims, s are spatial in
C(d, s) ways, and the others are walked in (d - s)! orders. One dim at least is spatial: with none,
the grid is one cluster and all other multiprocessors idle. So the d! orders of s = 0 are not
counted; everything in space is, with nothing left to order. For two products over m, n, k, l this
gives 4 * 3! + 6 * 2! + 4 * 1! + 1 * 0! = 41.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import comb, factorial

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain


@dataclass(frozen=True)
class LoopSchedule:
    """A partition of the dims, and an order.

    Attributes
    ----------
    spatial : tuple[str, ...]
        Dims along which clusters stand.
    order : tuple[str, ...]
        Temporal dims, outermost first. A *position* is an index into it; ``len(order)`` is inside
        all loops.
    """

    spatial: tuple[str, ...]
    order: tuple[str, ...]

    def position(self, dim: str) -> int:
        """Position of a dim; -1, outside all loops, of a spatial one."""
        return self.order.index(dim) if dim in self.order else -1

    def __str__(self) -> str:
        """Spatial dims, a bar, temporal dims; `read_schedule` reads it back."""
        return " ".join((*self.spatial, "|", *self.order))


def loop_schedules(dims: Sequence[str]) -> Iterator[LoopSchedule]:
    """All schedules of some dims, those with few spatial ones first.

    Parameters
    ----------
    dims : Sequence[str]
        Names, such as those of a chain's dims.

    Yields
    ------
    LoopSchedule
        `schedule_count` of them, each once.

    Examples
    --------
    >>> [str(each) for each in loop_schedules("mn")]
    ['m | n', 'n | m', 'm n |']
    """
    for count in range(1, len(dims) + 1):
        for spatial in combinations(dims, count):
            rest = [each for each in dims if each not in spatial]
            for order in permutations(rest):
                yield LoopSchedule(spatial, order)


def schedule_count(dims: int) -> int:
    """How many schedules some dims have; see the module."""
    return sum(comb(dims, s) * factorial(dims - s) for s in range(1, dims + 1))


def read_schedule(text: str, chain: Chain) -> LoopSchedule:
    """Read a schedule from text.

    Parameters
    ----------
    text : str
        Spatial dims, a bar, temporal dims, outermost first: ``"m n | l k"``.
    chain : Chain
        Whose dims it has.

    Returns
    -------
    LoopSchedule
        The value.

    Raises
    ------
    PlanRefused
        Without the bar, with unknown, repeated or missing dims, or without a spatial one.
    """
    spatial, bar, order = text.partition("|")
    schedule = LoopSchedule(tuple(spatial.split()), tuple(order.split()))
    named, known = [*schedule.spatial, *schedule.order], list(chain.extents)
    if not bar or sorted(named) != sorted(known) or not schedule.spatial:
        raise refuse(
            PlanRefused,
            "loop-schedule",
            "schedule",
            found=repr(text),
            limit="each of " + ", ".join(known) + " once, and at least one of them before the bar",
            instead=f"write {known[0] + ' | ' + ' '.join(known[1:])!r}, say",
        )
    return schedule
