"""Where intermediates and partial sums live: the fastest memory first, the rest in the next.

```
registers -> shared memory of the CTA -> of the others that read it too (DSM) -> L2 -> HBM
```

A tensor may straddle several. DSM is no memory of its own: every CTA of a cluster has as much to
place as the others, so that nobody has room to spare for a peer's private data. What it saves is
copies. Of `bytes` that each of X CTAs reads, each needs all; stored once, each has 1/X of them and
reads the rest from its peers. With c bytes of room in each CTA, c of them are local and up to
(X - 1) c more are a peer's:

```
bytes 6, X = 4, c = 3      local 3: all that fits        DSM 3, of (X - 1) c = 9
each stores 2 bytes that all have (d) and 1 of the other 4 (s / X):  d + s = 6, d + s / X = 3
```

(Published planners give DSM a capacity like any other level, for data that only one CTA reads as
well.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.kernels.shape import Count, Share, least, most
from study.dataflow.cluster import cluster_lanes, floor_div
from study.dataflow.published import ACCUMULATOR
from study.dataflow.schedules import Residency
from study.dataflow.volume import Nest, region_elements, sums_of

PLACES = ("registers", "shared", "dsm", "l2", "hbm")
_REGISTER = 4


def gathered(chain: Chain, made: tuple[Nest, ...], index: int, hold: int) -> Count:
    """Bytes that a unit reads of the intermediate left operand of product `index`.

    At the level of CTAs these are its own part and those of its shuffle group.
    """
    tensor = chain.tensor(chain.products[index].left)
    return region_elements(made[index], tensor.dims, hold) * tensor.item


def accumulators(
    chain: Chain, cluster: Mapping[str, Count], made: tuple[Nest, ...], index: int, hold: int
) -> Count:
    """Bytes of partial sums that a unit has of the result of product `index`.

    Sums are partial until the loop over the reduction is through, so that all tiles inside it are
    there at once. A result that moves after each tile (a `hold` further in) has fewer: its partial
    sums move.
    """
    tensor = chain.tensor(chain.products[index].output)
    sums = sums_of(chain, cluster, index)
    return region_elements(made[index], tensor.dims, hold) * ACCUMULATOR * sums


@dataclass(frozen=True)
class Need:
    """Something to place, in each CTA alike.

    Attributes
    ----------
    name : str
        The tensor.
    bytes : Count
        That a CTA reads and writes.
    sharers : Count
        CTAs that read the same bytes: of a gathered intermediate its shuffle group, 1 of private
        data.
    registers : bool
        Whether registers can have it: partial sums, and what the CTA made itself.
    units : Count
        Groups of sharers in the grid, each with bytes of its own in L2.
    """

    name: str
    bytes: Count
    sharers: Count = 1
    registers: bool = False
    units: Count = 1


@dataclass(frozen=True)
class Capacities:
    """Room.

    Attributes
    ----------
    registers, shared : Count
        Bytes of a CTA that are left beside operands on their way.
    l2 : Count
        Bytes for the whole grid.
    """

    registers: Count
    shared: Count
    l2: Count


def capacities(
    device: Device, *, threads: int, other_registers: int, pipeline: Count, l2_share: float = 0.5
) -> Capacities:
    """Say what room a kernel leaves.

    Parameters
    ----------
    device : Device
        Its limits.
    threads : int
        Threads of a CTA that hold elements.
    other_registers : int
        Registers of each of them for addresses, counters and operands.
    pipeline : Count
        Bytes of shared memory for rings of operands and staging.
    l2_share : float
        Part of L2 that is for intermediates; weights and inputs stream through the rest.

    Returns
    -------
    Capacities
        Never below 0.

    Raises
    ------
    PlanRefused
        Without threads, more than a CTA may have, or with a share outside 0 to 1.
    """
    if not 0 < threads <= device.max_threads or not 0 <= l2_share <= 1:
        raise refuse(
            PlanRefused,
            "capacities",
            "threads, l2_share",
            found=f"{threads}, {l2_share}",
            limit=f"1 to {device.max_threads} threads, and a share of 0 to 1",
            instead="write 256 threads and a share of 0.5, say",
        )
    each = min(device.registers // threads, 255) - other_registers
    return Capacities(
        max(each, 0) * threads * _REGISTER,
        most(device.max_shared_bytes - pipeline, 0),
        int(device.l2_bytes * l2_share),
    )


def place(needs: Sequence[Need], room: Capacities) -> dict[str, dict[str, Count]]:
    """Give each tensor the fastest places that are left, in the order of `needs`.

    Parameters
    ----------
    needs : Sequence[Need]
        What is used most first.
    room : Capacities
        See there.

    Returns
    -------
    dict[str, dict[str, Count]]
        Bytes by place for each tensor, as one CTA sees it; together they are the need's bytes.

    Raises
    ------
    PlanRefused
        If two needs have one name.
    """
    names = [each.name for each in needs]
    if len(set(names)) != len(names):
        raise refuse(
            PlanRefused,
            "placement",
            "needs",
            found=", ".join(names),
            limit="one need for each tensor",
            instead="add the bytes of those of one name, or name them apart",
        )
    registers, shared, l2 = room.registers, room.shared, room.l2
    placed = {}
    for need in needs:
        left, where = need.bytes, dict.fromkeys(PLACES, 0 * need.bytes)
        if need.registers:
            where["registers"] = least(left, registers)
            registers = registers - where["registers"]
            left = left - where["registers"]
        where["shared"] = least(left, shared)
        left = left - where["shared"]
        where["dsm"] = least(left, (need.sharers - 1) * shared)
        left = left - where["dsm"]
        shared = shared - where["shared"]
        where["l2"] = least(left, floor_div(l2, need.units))
        l2 = l2 - where["l2"] * need.units
        where["hbm"] = left - where["l2"]
        placed[need.name] = where
    return placed


def needs_of(
    chain: Chain,
    cluster: Mapping[str, Count],
    made: tuple[Nest, ...],
    residency: Residency,
    ctas: Count,
) -> list[Need]:
    """List what each CTA has to place, what is used most first.

    Sums come before intermediates, because every instruction adds to them. What a grid-wide
    intermediate takes is in L2 whatever room there is, and is not listed.

    Parameters
    ----------
    chain : Chain
        What is computed.
    cluster : Mapping[str, Count]
        CTAs along each dim.
    made : tuple[Nest, ...]
        Nests of CTAs, see `study.dataflow.volume.nests`.
    residency : Residency
        As for the nests.
    ctas : Count
        CTAs that run at the same time, which share L2.

    Returns
    -------
    list[Need]
        ``"C sums"`` and so on for sums, the tensor's name for an intermediate.
    """
    schedule, lanes = made[0].schedule, cluster_lanes(chain, cluster)
    sums, held = [], []
    for index, product in enumerate(chain.products):
        tensor = chain.tensor(product.output)
        # Sums are partial until the reduction is through; an output may leave before.
        hold = schedule.position(product.reduction)
        hold = len(schedule.order) if hold < 0 else hold
        if tensor.role == "output":
            hold = residency.position(tensor, schedule)
        size = accumulators(chain, cluster, made, index, hold)
        sums.append(Need(f"{tensor.name} sums", size, registers=True, units=ctas))
        if tensor.role == "intermediate" and tensor.name not in residency.grid_wide:
            group = lanes[index + 1].shuffle
            size = gathered(chain, made, index + 1, residency.position(tensor, schedule))
            held.append(Need(tensor.name, size, sharers=group, units=floor_div(ctas, group)))
    return [*reversed(sums), *held]


def spilled(
    chain: Chain, needs: Sequence[Need], placed: Mapping[str, Mapping[str, Count]]
) -> dict[str, Share]:
    """Say which part of each intermediate found no room in its cluster.

    Parameters
    ----------
    chain : Chain
        What is computed.
    needs : Sequence[Need]
        From `needs_of`.
    placed : Mapping[str, Mapping[str, Count]]
        From `study.dataflow.placement.place`.

    Returns
    -------
    dict[str, Share]
        By intermediate, 0 to 1, for `study.dataflow.movement.Machine`.
    """
    known = {each.name for each in chain.intermediates}
    return {
        each.name: (placed[each.name]["l2"] + placed[each.name]["hbm"]) / each.bytes
        for each in needs
        if each.name in known
    }
