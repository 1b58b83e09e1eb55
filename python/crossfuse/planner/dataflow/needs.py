"""What a fused chain has to place: partial sums, and intermediates for as long as they are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.cluster import cluster_lanes
from crossfuse.planner.dataflow.counts import Count, Share, floor_div
from crossfuse.planner.dataflow.footprint import accumulators, gathered
from crossfuse.planner.dataflow.placement import Need
from crossfuse.planner.dataflow.residency import Residency
from crossfuse.planner.dataflow.volume import Nest


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
        Nests of CTAs, see `crossfuse.planner.dataflow.volume.nests`.
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
        From `crossfuse.planner.dataflow.placement.place`.

    Returns
    -------
    dict[str, Share]
        By intermediate, 0 to 1, for `crossfuse.planner.dataflow.movement.Machine`.
    """
    known = {each.name for each in chain.intermediates}
    return {
        each.name: (placed[each.name]["l2"] + placed[each.name]["hbm"]) / each.bytes
        for each in needs
        if each.name in known
    }
