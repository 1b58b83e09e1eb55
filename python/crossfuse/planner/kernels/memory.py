"""Shared memory of a CTA: as many stages as fit beside everything else in it.

The lowering divides it by the same `divide`, and places regions in an `Arena`, see `plan_memory` of
`crossfuse.lower.hopper.plan.kernel`; `_Needs` has the sums of that, over arrays. Tests hold the two
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Count, Flag, ceil_div, choose, least, most

#: Of tiles in shared memory, in bytes: a pattern of the 128-byte swizzle is eight rows.
ALIGNMENT = 1024
#: Stages at least, without which no tile is loaded while another is multiplied, and at most.
LEAST_STAGES, _MAX_STAGES = 2, 12
#: Bytes of weights that a CTA has in flight at least: 3 TB/s through 132 SMs for 3 us, the
#: latency of a busy memory. Measured, see docs/hopper-measured.md.
ON_THEIR_WAY = 72 << 10
#: The same before the rows of the first left tile are made, which wait behind it; all others are
#: asked for once these are there. Of a norm before 256 x 4096 by 12288 on an H100 the first tiles
#: came at 6.7 us where 12 KiB at a time were in flight until the ring was full, and at 4.3 so.
BEFORE_ROWS = 12 << 10
#: Stages of left tiles that cover the latency of L2, from which they mostly come.
_LEFT_STAGES = 4


#: Bytes of an mbarrier, of those of a stage of left tiles and one of right tiles each, and of those
#: through which CTAs exchange sums.
BARRIER, STAGE_BARRIERS, EXCHANGE_BARRIERS = 8, 16, 16


# Where things lie, region by region.


@dataclass(frozen=True)
class Region:
    """A named piece of shared memory, in bytes."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Piece:
    """Shared memory that a feature of a kernel asks for."""

    name: str
    #: In bytes, as its alignment is.
    size: int
    alignment: int = BARRIER


@dataclass(frozen=True)
class Arena:
    """Regions one after another, in the order of their addition, and aliases in their place."""

    regions: tuple[Region, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return max((each.end for each in self.regions), default=0)

    def __contains__(self, name: str) -> bool:
        return any(each.name == name for each in self.regions)

    def __getitem__(self, name: str) -> Region:
        return next(each for each in self.regions if each.name == name)

    def with_pieces(self, pieces: Iterable[Piece]) -> Arena:
        """An arena that has some more regions."""
        return reduce(lambda arena, x: arena.with_region(x.name, x.size, x.alignment), pieces, self)

    def with_region(self, name: str, size: int, alignment: int) -> Arena:
        """An arena that has one more region, of `size` bytes.

        The `alignment` of its offset is 1024 for tiles with a 128-byte swizzle, 8 for barriers.
        """
        offset = -(-self.size // alignment) * alignment
        return Arena((*self.regions, Region(name, offset, size)))

    def with_alias(self, name: str, other: str, size: int) -> Arena:
        """An arena with a region that begins where another does, which is not in use any more then.

        At most of its size.
        """
        return Arena((*self.regions, Region(name, self[other].offset, size)))


# How many stages fit, of one candidate or of many.


@dataclass(frozen=True)
class Memory:
    """Shared memory of a kernel's CTA."""

    #: Stages of left and of right tiles.
    left: Count
    right: Count
    #: Bytes in all.
    size: Count
    #: Whether two stages of each fit.
    fits: Flag


@dataclass(frozen=True)
class _Needs:
    """Bytes of a CTA that do not depend on the stages, and bytes of a stage."""

    left: Count
    right: Count
    before: Count
    received: Count
    #: Whether a warpgroup multiplies several blocks of rows.
    tall: Flag
    #: Those of no ring.
    barriers: Count
    held: Count

    def size(self, left: Count, right: Count) -> Count:
        """Bytes with these numbers of stages."""
        lefts = left * self.left
        room, _ = place_of_received(lefts, right * self.right, self.received, self.tall)
        return self.before + lefts + room + self.barriers + STAGE_BARRIERS * (left + right)


def place_of_received(left: Count, right: Count, received: Count, tall: Flag) -> tuple[Count, Flag]:
    """Find the bytes of the place of right tiles, if that of what peers send is theirs.

    Also whether that takes the place of left tiles too: where rows are `tall`, of several blocks
    each warpgroup, and right tiles do not suffice. All are bytes.
    """
    spread = tall & (received > right)
    return most(right, received - choose(spread, left, 0)), spread


def memory(phases: Sequence[Phase], device: Device, *, waits: Flag = False) -> Memory:
    """Divide shared memory among the rings of a kernel with the given phases.

    `waits` is whether there is one more barrier: for partial tiles that CTAs add at the end, or for
    rows that are made before right tiles are loaded.
    """
    needs = _needs(phases, waits)
    left, right = divide(needs.size, needs.held, device.max_shared_bytes)
    fits = (right >= LEAST_STAGES) & (left >= LEAST_STAGES)
    return Memory(left, right, needs.size(left, right), fits)


def divide(size: Callable[[Count, Count], Count], held: Count, limit: int) -> tuple[Count, Count]:
    """Choose the stages of left and of right tiles; 0 where no two of each fit in `limit` bytes.

    Right tiles come from far away: as many of their stages as fit with four left ones, for which L2
    is near enough; then as many left ones as fit beside them, but no more than right ones. `held`
    is the least number of left stages, in which tiles wait for their store; `size` are bytes by
    left and right stages.
    """
    right: Count = 0
    for stages in range(LEAST_STAGES, _MAX_STAGES + 1):
        fewest = most(least(_LEFT_STAGES, stages), held)
        possible = (size(fewest, stages) <= limit) & (held <= stages)
        right = choose(possible, stages, right)
    left: Count = 0
    for stages in range(LEAST_STAGES, _MAX_STAGES + 1):
        possible = (size(stages, right) <= limit) & (stages <= right)
        left = choose(possible & (stages >= held), stages, left)
    return left, right


def uses(phases: Sequence[Phase], room: Memory) -> dict[str, int]:
    """Break down the shared memory of one candidate's CTA: bytes by use, which add up to all."""
    needs = _needs(phases, False)
    left, right = int(room.left * needs.left), int(room.right * needs.right)
    _, over = place_of_received(left, right, needs.received, needs.tall)
    found = {
        "left tiles": left,
        "right tiles": right,
        "intermediate": int(reduce(most, [each.gathered for each in phases])),
        "stores": int(reduce(most, [each.boxes for each in phases]) * phases[0].warpgroups),
        # They take the place of tiles, once these have been multiplied.
        "sums beyond tiles": max(int(needs.received) - right - (left if over else 0), 0),
    }
    found["barriers and padding"] = int(room.size) - sum(found.values())
    return {name: size for name, size in found.items() if size}


def _needs(phases: Sequence[Phase], waits: Flag) -> _Needs:
    groups = phases[0].warpgroups
    boxes = reduce(most, [each.boxes for each in phases]) * groups
    gathered = reduce(most, [each.gathered for each in phases])
    received = reduce(most, [each.received for each in phases])
    barriers = choose(gathered > 0, BARRIER * groups, 0)
    before = ceil_div(boxes + gathered + barriers, ALIGNMENT) * ALIGNMENT
    return _Needs(
        reduce(most, [each.left for each in phases]),
        reduce(most, [each.right for each in phases]),
        before,
        received,
        phases[0].blocks > 1,
        choose(received > 0, EXCHANGE_BARRIERS, 0) + choose(waits, BARRIER, 0),
        reduce(most, [each.pages for each in phases]),
    )


def resident(device: Device, size: Count) -> Count:
    """Clusters of a size that run at once, one CTA an SM; see `Device.resident_clusters`.

    Sizes go up to 16 CTAs; of larger clusters, which rules leave out, 1 is assumed.
    """
    table = _table(device)
    if isinstance(size, np.ndarray):
        return table[np.minimum(size, len(table) - 1).astype(np.int64)]
    return int(table[min(int(size), len(table) - 1)])


@lru_cache(maxsize=8)
def _table(device: Device) -> np.ndarray:
    sizes = range(1, device.max_cluster + 1)
    return np.array([device.sms, *map(device.resident_clusters, sizes), 1], np.float64)


def cached_level(size: int, device: Device) -> str:
    """Level of a tensor that one kernel stores and the next reads.

    What L2 has no room for goes to memory and comes back.
    """
    return "l2" if size <= device.l2_bytes // 2 else "hbm"
