"""How much room tiles and held regions take in one unit of a level."""

from __future__ import annotations

from collections.abc import Mapping

from crossfuse.planner.chain.check import TERMS
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import Count, floor_div
from crossfuse.planner.dataflow.residency import Residency
from crossfuse.planner.dataflow.volume import Nest

#: Bytes of a partial sum.
ACCUMULATOR = 4


def region_elements(nest: Nest, dims: tuple[str, ...], hold: int) -> Count:
    """Count the elements of a tensor that a unit has at once.

    Parameters
    ----------
    nest : Nest
        Of a product that has the tensor.
    dims : tuple[str, ...]
        The tensor's.
    hold : int
        Its position: dims from there on are in the unit with all their tiles, others with one.

    Returns
    -------
    Count
        Elements of the largest region.
    """
    count: Count = 1
    for dim in dims:
        grain = nest.grains[dim]
        count = count * (grain.held if nest.schedule.position(dim) >= hold else grain.once)
    return count


def footprints(chain: Chain, made: tuple[Nest, ...], residency: Residency) -> dict[str, Count]:
    """Say how many bytes a unit has of each tensor, as stored.

    Parameters
    ----------
    chain : Chain
        What is computed.
    made : tuple[Nest, ...]
        Its `nests` at a level.
    residency : Residency
        As for the nests.

    Returns
    -------
    dict[str, Count]
        Bytes by tensor: of an intermediate as the product has it that makes it, which at the level
        of CTAs is its own part.
    """
    found: dict[str, Count] = {}
    for nest, product in zip(made, chain.products, strict=True):
        for name in (product.left, *product.rights, product.output):
            tensor = chain.tensor(name)
            hold = residency.position(tensor, nest.schedule)
            if name not in found:
                found[name] = region_elements(nest, tensor.dims, hold) * tensor.item
    return found


def gathered(chain: Chain, made: tuple[Nest, ...], index: int, hold: int) -> Count:
    """Bytes that a unit reads of the intermediate left operand of product `index`.

    At the level of CTAs these are its own part and those of its shuffle group.
    """
    tensor = chain.tensor(chain.products[index].left)
    return region_elements(made[index], tensor.dims, hold) * tensor.item


def sums_of(chain: Chain, cluster: Mapping[str, Count], index: int) -> Count:
    """Sums that a CTA has for each element of the result of a product: of its weights."""
    terms = len(chain.products[index].rights)
    return terms if index else floor_div(terms, cluster.get(TERMS, 1))


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
