"""How much moves: the three rules of Chimera (HPCA 2023) in closed form.

Walk the loops from the inside out. For a tensor,

1. a loop that does not index it moves nothing, as long as the same tile is there;
2. once a loop that indexes it has been crossed, every loop outside multiplies, whether it indexes
   the tensor or not: when the inner loop starts again, the tile that was there is gone;
3. loops that belong to a producer alone cost the consumer nothing: the producer is through with
   them when the consumer starts.

```
order m l n k         A[m,k]                        D[l,n]
  k                   indexes: crossed              not of the second product (rule 3)
  n                   multiplies                    indexes: crossed
  l                   multiplies if C is made       indexes
  m                   indexes                       multiplies
moved                 M K * N/bn [* L/bl]           N L * M/bm
```

The rules are exact here where the published form is not. A loop of one iteration crosses nothing.
Edge tiles are clipped: along a dim that indexes the tensor, all tiles together are its extent, so
nothing is rounded up. Units side by side along a dim that does not index a tensor each get a copy.
The producer repeats with a loop of its consumer only if what it makes is gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crossfuse.planner.chain.spec import TERMS, Chain, refuse_reductions
from crossfuse.planner.kernels.shape import Count, Flag, ceil_div, choose
from study.dataflow.cluster import floor_div
from study.dataflow.published import LoopSchedule
from study.dataflow.schedules import Residency
from study.dataflow.tiling import Grain, Tiling, View, grains


@dataclass(frozen=True)
class Nest:
    """The loops of one product at one level."""

    schedule: LoopSchedule
    #: Dims that the product runs over.
    own: tuple[str, ...]
    #: What a unit takes along each dim.
    grains: Mapping[str, Grain]
    #: Dims of later products that this one is repeated by, and for which candidates.
    repeats: Mapping[str, Flag]


def nests(
    chain: Chain, schedule: LoopSchedule, tiling: Tiling, residency: Residency
) -> dict[str, tuple[Nest, ...]]:
    """Make the nest of each product at each of `study.dataflow.tiling.LEVELS`.

    The candidates must pass `check_tiling` and `check_residency`. Chains with reductions that are
    no products are refused: nothing says what they move.
    """
    refuse_reductions(chain)
    views = grains(chain, schedule, tiling)
    return {level: _nests(chain, schedule, view, residency) for level, view in views.items()}


def _nests(
    chain: Chain, schedule: LoopSchedule, view: View, residency: Residency
) -> tuple[Nest, ...]:
    repeats: dict[str, Flag] = {}
    made: list[Nest] = []
    for index in reversed(range(len(chain.products))):
        own = chain.loops(index)
        if index < len(chain.products) - 1:
            repeats = _repeats(chain, index, made[-1], residency)
        made.append(Nest(schedule, own, view[index], repeats))
    return tuple(reversed(made))


def _repeats(chain: Chain, index: int, consumer: Nest, residency: Residency) -> dict[str, Flag]:
    """Dims that a product is repeated by: those of its consumer during which its result is lost."""
    schedule, tensor = consumer.schedule, chain.tensor(chain.products[index].output)
    hold, own = residency.position(tensor, schedule), chain.loops(index)
    found: dict[str, Flag] = {}
    for dim, flag in {**dict.fromkeys(consumer.own, True), **consumer.repeats}.items():
        position = schedule.position(dim)
        if dim in own:
            continue
        if position >= 0:
            gone: Flag = False
            for inner in schedule.order[position + 1 : hold]:
                if inner in tensor.dims:
                    gone = gone | (consumer.grains[inner].steps > 1)
            found[dim] = flag & gone
        elif tensor.name not in residency.grid_wide:
            found[dim] = flag
    return found


def elements_moved(nest: Nest, dims: tuple[str, ...], hold: int, *, first: bool = False) -> Count:
    """Count the elements of an operand or result that move in or out of the units of a level.

    They are of all units together, over the whole run. `hold` is the tensor's position, see
    `study.dataflow.schedules`. With `first`, only the first time that a unit has an
    element counts.
    """
    schedule, count = nest.schedule, _side_by_side(nest, dims)
    gone: Flag = False
    for position in reversed(range(len(schedule.order))):
        dim = schedule.order[position]
        grain = nest.grains[dim]
        if dim in nest.own and dim in dims:
            count = count * grain.extent
            if position < hold and not first:
                gone = gone | (grain.steps > 1)
        elif dim in nest.own:
            count = count * choose(gone, grain.tiles, grain.active)
        elif dim in nest.repeats:
            count = count * choose(gone & nest.repeats[dim], grain.steps, 1)
    return count


def _side_by_side(nest: Nest, dims: tuple[str, ...]) -> Count:
    """Factor of the count that spatial dims contribute."""
    count: Count = 1
    for dim in nest.schedule.spatial:
        grain = nest.grains[dim]
        if dim in nest.own and dim in dims:
            count = count * grain.extent
        elif dim in nest.own or dim in nest.repeats:
            count = count * grain.tiles
    return count


def elements_made(nest: Nest, dims: tuple[str, ...]) -> Count:
    """Count the elements of its result that a product makes, with the dims of the result.

    They count as often as the product is repeated, once for each unit that has a share of the sum.
    """
    count: Count = 1
    for dim in nest.own:
        count = count * (nest.grains[dim].extent if dim in dims else nest.grains[dim].active)
    return count * _times(nest)


def _times(nest: Nest) -> Count:
    """Number of times that a product runs as a whole."""
    count: Count = 1
    for dim, flag in nest.repeats.items():
        grain = nest.grains[dim]
        repeated = grain.tiles if dim in nest.schedule.spatial else grain.steps
        count = count * choose(flag, repeated, 1)
    return count


def operand_reads(nest: Nest, dims: tuple[str, ...], pieces: Mapping[str, int]) -> Count:
    """Count the elements that tensor cores read of an operand in shared memory, over a whole run.

    Nothing stays in the tensor cores: each instruction reads its operands, so that a tile of 128
    rows in instructions of 64 reads its right operand twice. `pieces` is what an instruction takes
    along dims that do not index the operand; 1 where absent.
    """
    count: Count = 1
    for dim, grain in nest.grains.items():
        if dim in nest.own and dim in dims:
            count = count * grain.extent
        elif dim in nest.own:
            size = pieces.get(dim, 1)
            whole = floor_div(grain.extent, grain.tile)
            rest = grain.extent - whole * grain.tile
            count = count * (whole * ceil_div(grain.tile, size) + ceil_div(rest, size))
    return count * _times(nest)


# Footprints of tiles and held regions in one unit of a level.


def region_elements(nest: Nest, dims: tuple[str, ...], hold: int) -> Count:
    """Count the elements of a tensor that a unit has at once, of the largest region.

    Dims from the position `hold` on are in the unit with all their tiles, others with one.
    """
    count: Count = 1
    for dim in dims:
        grain = nest.grains[dim]
        count = count * (grain.held if nest.schedule.position(dim) >= hold else grain.once)
    return count


def sums_of(chain: Chain, cluster: Mapping[str, Count], index: int) -> Count:
    """Number of sums that a CTA has for each element of a product's result: one for each weight."""
    terms = len(chain.products[index].rights)
    return terms if index else floor_div(terms, cluster.get(TERMS, 1))
