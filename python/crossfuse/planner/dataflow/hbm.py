"""What a chain moves between HBM and L2, which keeps what the loops inside some position touch."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.counts import Count, Flag, ceil_div, choose
from crossfuse.planner.dataflow.footprint import region_elements
from crossfuse.planner.dataflow.moving import further, inputs, operands, written_bytes
from crossfuse.planner.dataflow.residency import Residency
from crossfuse.planner.dataflow.volume import Nest, elements_made, elements_moved


def through_hbm(
    chain: Chain, made: tuple[Nest, ...], residency: Residency, l2_bytes: int
) -> dict[str, Count]:
    """Count bytes by tensor: what L2 cannot keep comes again; what fits moves once, or not at all.

    Parameters
    ----------
    chain, residency
        See `crossfuse.planner.dataflow.movement.movement`.
    made : tuple[Nest, ...]
        Of the grid, from `crossfuse.planner.dataflow.volume.nests`.
    l2_bytes : int
        L2 for tiles that are read again.

    Returns
    -------
    dict[str, Count]
        An intermediate that fits does not move.
    """
    inner = len(made[0].schedule.order)
    given = inputs(chain, made)
    # What a CTA holds for longer than L2 does not come again for that.
    longest = {each.name: residency.position(each, made[0].schedule) for each in chain.tensors}
    result: Count = 0
    found: dict[str, Count] = {}
    for hold in reversed(range(inner + 1)):
        fits: Flag = hold == inner
        if hold < inner:
            fits = _working_set(chain, made, residency, hold) <= l2_bytes
        for nest, tensor in given:
            size = _from_hbm(nest, tensor, min(hold, longest[tensor.name]))
            found[tensor.name] = choose(fits, size, found.get(tensor.name, 0))
        stays = min(hold, longest[chain.output.name])
        result = choose(fits, written_bytes(chain, made[-1], stays, adds=False), result)
    for index, tensor in enumerate(chain.intermediates):
        if tensor.name in residency.grid_wide:
            consumer, hold = made[index + 1], residency.position(tensor, made[0].schedule)
            region = region_elements(consumer, tensor.dims, hold) * tensor.item
            moved = elements_made(made[index], tensor.dims) * tensor.item
            moved = moved + _from_hbm(consumer, tensor, inner)
            streams = _working_set(chain, made, replace(residency, grid_wide=frozenset()), inner)
            found[tensor.name] = choose(region + streams <= l2_bytes, 0, moved)
    return {**found, chain.output.name: result}


def _working_set(chain: Chain, made: tuple[Nest, ...], residency: Residency, hold: int) -> Count:
    """Bytes that the loops from a position on touch in L2."""
    needed: Count = 0
    moving = (*operands(chain, made), *further(chain, made), (made[-1], chain.output))
    for nest, tensor in moving:
        if tensor.role != "intermediate" or tensor.name in residency.grid_wide:
            needed = needed + _in_memory(region_elements(nest, tensor.dims, hold), tensor)
    return needed


def _from_hbm(nest: Nest, tensor: Tensor, hold: int) -> Count:
    return _in_memory(elements_moved(nest, tensor.dims, hold), tensor)


def _in_memory(elements: Count, tensor: Tensor) -> Count:
    """Bytes that elements take in memory, where those that repeat stand once."""
    size = elements * tensor.item
    return ceil_div(size, tensor.repeats) if tensor.repeats > 1 else size
