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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain, Tensor


@dataclass(frozen=True)
class LoopSchedule:
    """A partition of the dims into spatial and temporal ones, and an order of the latter."""

    #: Dims along which clusters stand.
    spatial: tuple[str, ...]
    #: Temporal dims, outermost first. A *position* is an index into it; ``len(order)`` is inside
    #: all loops.
    order: tuple[str, ...]

    def position(self, dim: str) -> int:
        """Position of a dim; -1, outside all loops, of a spatial one."""
        return self.order.index(dim) if dim in self.order else -1

    def __str__(self) -> str:
        """Format as spatial dims, a bar, temporal dims; `read_schedule` reads it back."""
        return " ".join((*self.spatial, "|", *self.order))


def loop_schedules(dims: Sequence[str]) -> Iterator[LoopSchedule]:
    """List all schedules of some dims, those with few spatial ones first, each once.

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


def read_schedule(text: str, chain: Chain) -> LoopSchedule:
    """Read a schedule of a chain's dims from text such as ``"m n | l k"``.

    Refused without the bar, with unknown, repeated or missing dims, or without a spatial one.
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


# How long tensors stay where they are used, as positions in the loop order.
#
# A tensor with *hold* h stays while the loops from position h on run: the region that these loops
# touch is in the buffer at once, and is replaced when a loop outside of them that indexes the
# tensor moves on. ``len(order)`` holds one tile, 0 all that a unit ever uses.
#
# ```
# order m n k, A[m,k]:  hold 3   one tile; comes again for each n, as k has moved on in between
#                       hold 1   m-tile x all of k; comes once for each m
# ```
#
# An intermediate must be held from its reduction's position at the latest: before the loop over k
# is through, its tile is not made. If a loop of the consumer that does not index it stands outside
# a loop that does, it is made again (*recomputed*) unless its hold is as far out (*kept*):
#
# ```
# order m l n k, C[m,n]:  kept        hold 1   a stripe of all n is made once for each m
#                         recomputed  hold 3   tiles are made again for each l
# ```


@dataclass(frozen=True)
class Residency:
    """How long each tensor stays in its buffer, and which are made for all clusters."""

    #: Position by tensor; ``len(order)`` where absent. See above.
    hold: Mapping[str, int] = field(default_factory=dict)
    #: Intermediates that are made once for all clusters, and that clusters read from L2 or HBM.
    #: Others are made by each cluster that needs them.
    grid_wide: frozenset[str] = frozenset()

    def position(self, tensor: Tensor, schedule: LoopSchedule) -> int:
        """Position from which a tensor is held."""
        return self.hold.get(tensor.name, len(schedule.order))


def recomputed(chain: Chain, schedule: LoopSchedule) -> Residency:
    """Hold intermediates no longer than must be: Chimera's analysis."""
    latest = (_latest(chain, schedule, index) for index in range(len(chain.products) - 1))
    return Residency(dict(zip((each.name for each in chain.intermediates), latest, strict=True)))


def kept(chain: Chain, schedule: LoopSchedule) -> Residency:
    """Hold intermediates so long that each cluster makes them once: FlashFuser's analysis."""
    hold = {}
    for index, tensor in enumerate(chain.intermediates):
        # Loops of later products repeat the consumer no more, since its own result is kept.
        others = set(chain.loops(index + 1)) - set(tensor.dims)
        outside = [each for each in map(schedule.position, others) if each >= 0]
        hold[tensor.name] = min([_latest(chain, schedule, index), *outside])
    return Residency(hold)


def check_residency(chain: Chain, schedule: LoopSchedule, residency: Residency) -> None:
    """Refuse a residency that cannot be.

    These are unknown tensors, positions outside the order, intermediates that are held for less
    than their reduction, and grid-wide tensors that are no intermediates.
    """
    names = {each.name for each in chain.tensors}
    for name, position in residency.hold.items():
        if name not in names or not 0 <= position <= len(schedule.order):
            limit = f"0 to {len(schedule.order)}, for one of " + ", ".join(sorted(names))
            raise _refused(f"hold of {name}", position, limit, "leave it out to hold one tile")
    for index, tensor in enumerate(chain.intermediates):
        latest, found = _latest(chain, schedule, index), residency.position(tensor, schedule)
        if found > latest:
            reduction = chain.products[index].reduction
            limit = f"{latest}, outside the loop over {reduction!r}, before which no tile is made"
            raise _refused(f"hold of {tensor.name}", found, limit, f"write {latest} or less")
    known = {each.name for each in chain.intermediates}
    for name in sorted(residency.grid_wide - known):
        limit = "intermediates: " + (", ".join(sorted(known)) or "there are none")
        raise _refused("grid_wide", name, limit, "leave it out; inputs are in HBM for all clusters")


def _latest(chain: Chain, schedule: LoopSchedule, index: int) -> int:
    """Innermost position from which a product's result can be held."""
    position = schedule.position(chain.products[index].reduction)
    return position if position >= 0 else len(schedule.order)


def _refused(where: str, found: object, limit: str, instead: str) -> Exception:
    return refuse(PlanRefused, "residency", where, found=found, limit=limit, instead=instead)
