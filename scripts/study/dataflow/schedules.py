"""Loop schedules as text, and how long tensors stay where they are used.

What a schedule is stands in `study.dataflow.published`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain, Tensor
from study.dataflow.published import LoopSchedule, held, latest


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
    return Residency(
        {e.name: latest(chain, schedule, index) for index, e in enumerate(chain.intermediates)}
    )


def kept(chain: Chain, schedule: LoopSchedule) -> Residency:
    """Hold intermediates so long that each cluster makes them once: FlashFuser's analysis."""
    return Residency(held(chain, schedule))


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
        last, found = latest(chain, schedule, index), residency.position(tensor, schedule)
        if found > last:
            reduction = chain.products[index].reduction
            limit = f"{last}, outside the loop over {reduction!r}, before which no tile is made"
            raise _refused(f"hold of {tensor.name}", found, limit, f"write {last} or less")
    known = {each.name for each in chain.intermediates}
    for name in sorted(residency.grid_wide - known):
        limit = "intermediates: " + (", ".join(sorted(known)) or "there are none")
        raise _refused("grid_wide", name, limit, "leave it out; inputs are in HBM for all clusters")


def _refused(where: str, found: object, limit: str, instead: str) -> Exception:
    return refuse(PlanRefused, "residency", where, found=found, limit=limit, instead=instead)
