"""How long a stream of tiles takes: products, exponentials and memory at once, step by step.

::

    time  = start + maximum(fill + steps of the busiest CTA, memory + drain, ingest + drain)
            + store (of each tile) + merge and barrier (of clusters),
              or merge and relaunch (of a second kernel)

Products wait for the first keys (fill), and the last values for their product (drain). The time of
a step is that of `step_time`.

Constants were fitted to `benchmarks/results/cascade-candidates-h100.jsonl` (44 kernels of R1, R2
and R3) and to the masks and widths of `attention-variants-h100.txt`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossfuse.cascade.rewrite.tiles import WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import LANES, SPECIAL, clock
from crossfuse.planner.cascade.tile_space import (
    Steps,
    at_once,
    holds_left,
    step_bytes,
    steps_of,
    value_bytes,
)
from crossfuse.planner.cost.loop import OVERLAP, ingest_speed, overlapped, start_time
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.cost.terms import Estimate

# How long one step of a CTA takes: a tile of the axis against a tile of rows.
#
# ::
#
#     step = products with exponentials and arithmetic beside them + rescaled sums + masks + STEP
#
# All of it is counted in cycles. Their length depends on the step: dense products pull the clock of
# an H100 down to about 1600 MHz, and what does not multiply runs at 1980.

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
    """Microseconds of one step of a CTA, part by part."""

    #: Products, exponentials, and other arithmetic of elements.
    tensor: float
    special: float
    issue: float
    #: What nothing hides: rescaled sums, barriers.
    own: float
    masks: float
    #: How well products hide the rest; an exponent as `OVERLAP`.
    hiding: float

    def whole(self, *, special: bool = True, issue: bool = True) -> float:
        """Time of products with some of what goes on beside them."""
        beside = self.special * special + self.issue * issue
        return float((self.tensor**self.hiding + beside**self.hiding) ** (1 / self.hiding))

    def at_pace(self, pace: float) -> Step:
        """Stretch the step to cycles that are `pace` times as long."""
        names = ("tensor", "special", "issue", "own", "masks")
        return replace(self, **{each: getattr(self, each) * pace for each in names})


def step_time(work: TileWork, sizes: CascadeTiles, rates: Rates) -> Step:
    """Estimate one step; the tiles are all chosen."""
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


#: Microseconds from the last step of a tile to the first of the next: quotients, boxes, stores.
TILE = 0.7
#: Microseconds of a CTA that merges what its cluster sent, beside what is sent. One sequence of
#: 8192 keys and 8 heads of them (R3:batch=1) took 15.0 us in clusters of 8, 10.7 of them memory's.
MERGE = 0.2


@dataclass(frozen=True)
class _Ends:
    """Microseconds from the launch to the first loads, until they are there, and of a last step."""

    start: float
    fill: float
    drain: float


def tile_estimate(work: TileWork, tiles: CascadeTiles, device: Device, rates: Rates) -> Estimate:
    """Estimate a stream of tiles."""
    found = steps_of(work, tiles)
    step, size, room = step_time(work, found.sizes, rates), tiles.cluster, at_once(tiles, device)
    streams_of = found.places * tiles.alone
    turns = -(-streams_of // room)
    serial = _serial(found, room, tiles)
    even = found.total * tiles.alone / min(streams_of, room) / size
    masked = found.masked / max(1, found.total) * step.masks
    moved = tile_bytes(work, tiles)
    busy = _memory(work, found, moved, serial, rates) | {"tensor": serial * step.tensor}
    busy |= {"exponentials": serial * step.special, "issue": serial * step.issue}
    within = (busy["hbm"], busy["l2"], busy["ingest"])
    ends = _ends(work, found, step, rates, min(room, streams_of))
    whole = serial * (step.whole() + step.own + masked)
    late = [each + ends.drain for each in within]
    stages = (
        ("hbm", 0.0, within[:1]),
        ("ingest", 0.0, within),
        ("tensor", even * step.tensor, within),
        ("exponentials", even * step.whole(issue=False), within),
        ("issue", even * step.whole(), within),
        ("steps", even * (step.whole() + step.own), within),
        ("masks", even * (step.whole() + step.own + masked), within),
        ("waves", whole, within),
        ("fill", whole + ends.fill, within),
        ("drain", whole + ends.fill, late),
    )
    terms: dict[str, float] = {}
    before = 0.0
    for name, computed, streams in stages:
        after = float(overlapped(computed, *streams))
        terms[name], before = after - before, after
    terms |= {"start": ends.start, "store": TILE * turns}
    if size > 1:
        again = start_time(rates, tiles.ctas_of_cluster, tiles.ctas_of_cluster)
        terms["waves"] += (turns - 1) * float(again)
        if tiles.in_memory:
            terms |= _stored(work, found, rates)
        else:
            terms |= _merged(work, found, size, turns, rates)
    return Estimate({name: time for name, time in terms.items() if time}, busy)


def tile_bytes(work: TileWork, tiles: CascadeTiles) -> dict[str, int]:
    """Bytes that a stream of tiles moves by level: ``hbm``, ``l2``, ``dsm`` and ``shared``."""
    found = steps_of(work, tiles)
    sizes, rows = found.sizes, work.groups * work.rows
    pieces = _pieces(work, sizes)
    # What tiles side by side share is read once for all of them.
    brought = found.total * pieces * step_bytes(work, sizes) // max(1, tiles.share)
    if holds_left(work, sizes):
        brought += found.places * min(sizes.rows, work.rows) * work.depth * work.left
    size = max(1, tiles.cluster)
    states = _state_bytes(work, found) * found.places * size
    # States that a second kernel merges are written, and read; memory never sees them.
    stored = 2 * states if tiles.in_memory else 0
    return {
        "hbm": work.inputs + rows * work.result,
        "l2": brought + rows * work.result + stored,
        # A CTA merges a slice of the columns of all.
        "dsm": 0 if tiles.in_memory else states * (size - 1) // size,
        "shared": brought,
    }


def _serial(found: Steps, room: int, tiles: CascadeTiles) -> float:
    """Steps of the busiest CTA; those of tiles that differ are shared out, the longest first."""
    streams = found.places * tiles.alone
    if found.even:
        return -(-streams // room) * -(-found.longest // tiles.cluster)
    shared = found.total * tiles.alone / min(streams, room)
    return max(shared, found.longest) / tiles.cluster


def _memory(
    work: TileWork, found: Steps, moved: dict[str, int], serial: float, rates: Rates
) -> dict[str, float]:
    """Microseconds of memory, of L2 and of what the busiest CTA takes in, each alone."""
    measured = rates.measured
    written = moved["hbm"] - work.inputs
    own = serial * _pieces(work, found.sizes) * step_bytes(work, found.sizes)
    return {
        "hbm": work.inputs / measured.hbm_read + written / measured.hbm_write,
        "l2": moved["l2"] / (rates.fitted.l2 * measured.l2_read),
        "ingest": own / ingest_speed(rates),
    }


def _ends(work: TileWork, found: Steps, step: Step, rates: Rates, clusters: int) -> _Ends:
    sizes = found.sizes
    size = sizes.ctas_of_cluster
    ctas = clusters * max(1, sizes.cluster // sizes.alone)
    share = min(ingest_speed(rates), rates.measured.hbm_read / ctas)
    held = min(sizes.rows, work.rows) * work.depth * work.left
    # Keys come before values, and the product with the last values is the last of two.
    late = value_bytes(work, sizes) if work.depth else 0
    first = step_bytes(work, sizes) - late + (held if holds_left(work, sizes) else 0)
    parts = _pieces(work, sizes) * (2 if work.depth and work.columns else 1)
    drain = step.whole() / parts + step.own
    return _Ends(float(start_time(rates, size, ctas)), first / share, drain)


def _pieces(work: TileWork, sizes: CascadeTiles) -> int:
    """Number of pieces in which the depth of the first product is loaded."""
    return -(-work.depth // sizes.depth) if sizes.depth else 1


def _merged(
    work: TileWork, found: Steps, cluster: int, turns: int, rates: Rates
) -> dict[str, float]:
    """Microseconds for the states of a cluster: sent through DSM, the barrier, and the merge."""
    state = _state_bytes(work, found)
    sent = state * (cluster - 1) / cluster / float(at(rates.measured.dsm_push, cluster))
    meeting = float(at(rates.measured.cluster_barrier, cluster))
    return {"merge": turns * (MERGE + sent), "barrier": turns * meeting}


def _stored(work: TileWork, found: Steps, rates: Rates) -> dict[str, float]:
    """Microseconds for states that a second kernel merges: written and read through L2, its launch.

    The launch was not timed alone: it is what kernels of two products take from one to the next.
    """
    states = _state_bytes(work, found) * found.places * found.sizes.cluster
    passed = 2 * states / (rates.fitted.l2 * rates.measured.l2_read)
    return {"merge": MERGE + passed, "relaunch": rates.fitted.relaunch}


def _state_bytes(work: TileWork, found: Steps) -> int:
    """Bytes of the state of a tile of rows."""
    return min(found.sizes.rows, work.rows) * 4 * (work.slots + found.sizes.columns)
