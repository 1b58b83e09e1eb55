"""How long one step of a CTA takes: a tile of the axis against a tile of rows.

::

    step = products with exponentials and arithmetic beside them + rescaled sums + masks + STEP

All of it is counted in cycles. Their length depends on the step: dense products pull the clock of
an H100 down to about 1600 MHz, and what does not multiply runs at 1980.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossfuse.cascade.rewrite.tiled.sizes import WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.tiled.work import TileWork
from crossfuse.planner.cascade.rates import LANES, SPECIAL, clock
from crossfuse.planner.cost.loop import OVERLAP
from crossfuse.planner.cost.rates import Rates

#: Cycles of a step beside its arithmetic: barriers, maxima of rows across lanes, the head of the
#: pipeline. One CTA a head (R3:batch=1, 8 heads) took 0.45, 0.66, 0.90 and 1.13 us for each step of
#: 32, 64, 96 and 128 keys; R1 1.85 and 1.15 us for 128 and 64 keys.
STEP = 280
#: Instructions of a sum and step: it is read, and multiplied with the factor of its row.
RESCALE = 2
#: Instructions of an element where masks are computed: indices, comparisons, selections. A window
#: has two masked tiles of five, and takes as much longer.
MASK = 16
#: How well one warpgroup hides exponentials behind products: as `OVERLAP`, which two reach that
#: take turns; 1 would be not at all. Steps of R3:batch=1 differ by 0.0071 us a key.
ALONE = 1.5
#: How much longer steps of more elements than these are than a line through shorter ones says: R1
#: with 160 keys, R2 with 160 and 192 in one warpgroup and in two. Why is not known; their scores
#: leave few registers to products that run ahead.
LARGE, LONGER = 128, 1.05


@dataclass(frozen=True)
class Step:
    """Microseconds of one step of a CTA, part by part.

    Attributes
    ----------
    tensor, special, issue : float
        Products, exponentials, and other arithmetic of elements.
    own : float
        What nothing hides: rescaled sums, barriers.
    masks : float
        Masks, where they are computed.
    hiding : float
        How well products hide the rest.
    """

    tensor: float
    special: float
    issue: float
    own: float
    masks: float
    hiding: float

    def whole(self, *, special: bool = True, issue: bool = True) -> float:
        """Products with some of what goes on beside them."""
        beside = self.special * special + self.issue * issue
        return float((self.tensor**self.hiding + beside**self.hiding) ** (1 / self.hiding))

    def at_pace(self, pace: float) -> Step:
        """The same step in cycles that are so much longer."""
        names = ("tensor", "special", "issue", "own", "masks")
        return replace(self, **{each: getattr(self, each) * pace for each in names})


def step_time(work: TileWork, sizes: CascadeTiles, rates: Rates) -> Step:
    """Time one step.

    Parameters
    ----------
    work : TileWork
        The cascade.
    sizes : CascadeTiles
        Tiles, all chosen.
    rates : Rates
        Of the device.

    Returns
    -------
    Step
        In microseconds.
    """
    elements = sizes.rows * sizes.elements
    cycle = clock(rates, dense=1.0)
    found = Step(
        _products(work, sizes, rates),
        elements * work.exponentials / (SPECIAL * cycle),
        elements * work.operations / (LANES * cycle),
        (STEP + RESCALE * sizes.rows * sizes.columns / LANES) / cycle,
        elements * MASK / (LANES * cycle) if work.masks else 0.0,
        ALONE if sizes.rows <= WARPGROUP_ROWS else OVERLAP,
    )
    if sizes.elements > LARGE:
        found = found.at_pace(LONGER)
    return found.at_pace(cycle / clock(rates, dense=found.tensor / (found.whole() + found.own)))


def _products(work: TileWork, sizes: CascadeTiles, rates: Rates) -> float:
    """Microseconds of the products, measured while nothing else went on."""
    elements, found = sizes.rows * sizes.elements, 0.0
    if work.depth:
        rate = float(rates.tensor_rate(sizes.rows, sizes.elements, work.left))
        found += 2.0 * elements * work.depth / rate
    if sizes.columns:
        rate = float(rates.tensor_rate(sizes.rows, sizes.columns, work.item))
        found += 2.0 * elements * sizes.columns / rate
    return found
