"""What a stream of tiles takes of an SM, and how long: products, exponentials and memory at once.

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

import numpy as np

from crossfuse.cascade.rewrite.tiles import WIDE, CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import WARPGROUP_ROWS, Device
from crossfuse.planner.cascade.shape import LANES, SPECIAL, clock
from crossfuse.planner.cost.estimate import OVERLAP, ingest_speed, overlapped
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.kernels import memory
from crossfuse.planner.kernels.memory import BOX_COLUMNS, LEAST_STAGES

# Resources of an SM that a stream of tiles takes.

#: Bytes of barriers of a lone product, at most.
_REST = 1024


def sum_registers(work: TileWork, sizes: CascadeTiles) -> int:
    """Float32 registers of a thread for scores, their weights, and sums.

    Sums of more columns than a warpgroup holds are shared by two.
    """
    return memory.element_registers(sizes.elements, 1) + min(sizes.columns, WIDE) // 2


def registers_fit(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether warpgroups have registers for a tile.

    Of expressions that need one array of scores, those are left out that only a warpgroup of their
    own has registers for: the estimate knows none, but where sums are wide.
    """
    of_rows = memory.REGISTERS.get(sizes.rows // WARPGROUP_ROWS)
    if of_rows is None or sum_registers(work, sizes) > of_rows[-1]:
        return False
    return not work.columns or adders(work, sizes) is not None


def adders(work: TileWork, sizes: CascadeTiles) -> int | None:
    """Warpgroups that share columns, see `crossfuse.planner.kernels.memory.adders_of`."""
    split = sizes.cluster > 1
    return memory.adders_of(sizes.rows, sizes.elements, sizes.columns, work.arrays, split=split)


def multiplying(work: TileWork, sizes: CascadeTiles) -> int:
    """Warpgroups that multiply: one for 64 rows, and those that share its columns."""
    shared = adders(work, sizes) if work.columns else 0
    return sizes.rows // WARPGROUP_ROWS + (shared or 0)


def at_once(tiles: CascadeTiles, device: Device) -> int:
    """Tiles of rows that a device works on at once, one CTA on an SM.

    Where a second kernel merges, these are parts of tiles, which wait for no others.
    """
    return tiles.share * device.resident_clusters(tiles.ctas_of_cluster)


def splits_axis(work: TileWork) -> bool:
    """Whether CTAs can share the axis: wide sums are in no registers to merge.

    Two warpgroups share them, apart from the rows whose states are merged.
    """
    return bool(work.depth) and 0 < work.columns <= WIDE


def steps_together(work: TileWork) -> bool:
    """Whether tiles of rows side by side go through the same elements, so that one load serves all.

    Under a causal mask each of them ends elsewhere.
    """
    return len({(first, behind) for _, first, behind in work.spans}) <= 1


def shared_bytes(work: TileWork, sizes: CascadeTiles, device: Device) -> int | None:
    """Bytes of shared memory of a CTA, with as many stages as the kernel has; None if it is none.

    Tiles of which two stages would not fit alone are not worth it. Of a lone product, whose kernel
    is planned as products are, it is the least.
    """
    limit, least = device.max_shared_bytes, least_bytes(work, sizes)
    if least > limit:
        return None
    if not work.depth or not work.columns:
        return least
    found = _stream_memory(work, sizes)
    stages = found.divide(0, limit)
    return None if stages is None else found.size(*stages)


def least_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of shared memory of a CTA with two stages, about.

    Results of more columns than a box leave through what the ring has then.
    """
    boxes = sizes.rows * min(sizes.columns, BOX_COLUMNS) * work.item
    held = sizes.rows * sizes.depth * work.left if holds_left(work, sizes) else 0
    return held + boxes + LEAST_STAGES * step_bytes(work, sizes) + _REST


def _stream_memory(work: TileWork, sizes: CascadeTiles) -> memory.StreamMemory:
    """Shared memory of a stream between two products, of which the lowering makes its regions."""
    rows, keys, columns = sizes.rows, sizes.elements, sizes.columns
    stored = min(rows, work.rows)
    handed = None
    if sizes.cluster > 1:
        size = memory.mailbox_bytes(sizes.cluster, stored, sizes.slice_of(columns), work.slots)
        handed = ("inbox", 0 if sizes.in_memory else size)
    elif adders(work, sizes):
        # A factor and a result of each slot at most.
        handed = ("passed", memory.handoff_bytes(keys, 2 * work.slots))
    return memory.StreamMemory(
        rows,
        stored,
        memory.tile_bytes(rows, sizes.depth, work.left),
        memory.tile_bytes(keys, sizes.depth, work.right),
        0 if work.same else memory.tile_bytes(keys, columns, work.value),
        WARPGROUP_ROWS * columns * 2,
        handed,
    )


def step_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes that a step loads into a CTA: tiles of both right operands, and of loaded elements.

    Where a product's depth is cut, a step is one piece of it.
    """
    right = sizes.elements * sizes.depth * work.right
    loaded = not work.depth or not holds_left(work, sizes)
    left = sizes.rows * (sizes.depth or sizes.elements) * work.left if loaded else 0
    return right + value_bytes(work, sizes) + left


def value_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of a step that only the second product takes; 0 where both share an operand."""
    return 0 if work.same else sizes.elements * sizes.columns * work.value


def holds_left(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether the left operand of the first product stays in shared memory.

    Not where one product makes whole rows: both its operands are loaded together.
    """
    all_depth = bool(work.depth) and sizes.depth == work.depth
    return all_depth and not sizes.makes_whole_rows(work.length)


# Steps of tiles of rows: the tiles of the axis that each of them needs, and which are masked.


@dataclass(frozen=True)
class Steps:
    """Steps of all CTAs of a stream of tiles: tiles of the axis against tiles of rows."""

    sizes: CascadeTiles
    places: int
    total: int
    longest: int
    masked: int

    @property
    def even(self) -> bool:
        """Whether all tiles have equally many steps."""
        return self.total == self.places * self.longest


def steps_of(work: TileWork, tiles: CascadeTiles) -> Steps:
    """Count the steps of tiles; what `tiles` leave open is chosen as for the kernel."""
    sizes = tiles.complete(work.rows, work.length, work.columns, work.depth)
    tall = -(-work.rows // sizes.rows)
    wide = -(-work.columns // sizes.columns) if sizes.columns else 1
    needed, masked = _needed(work, sizes, tall)
    others = work.groups * wide
    return Steps(
        sizes,
        tall * others,
        int(needed.sum()) * others,
        int(needed.max()),
        int(masked.sum()) * others,
    )


def _needed(work: TileWork, sizes: CascadeTiles, tall: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of each tile of rows, and those of them that not all of its rows need whole."""
    count = -(-work.length // sizes.elements)
    if not work.spans:
        # Masks that bound nothing are computed everywhere.
        masked = count if work.masks else 0
        return np.full(tall, count), np.full(tall, masked)
    rows, first, behind = np.array(work.spans, np.float64).T
    top = np.arange(tall) * sizes.rows
    last = np.minimum(top + sizes.rows, work.rows) - 1
    ends = np.stack([top, last])
    starts, stops = np.interp(ends, rows, first), np.interp(ends, rows, behind)
    begin = np.floor(starts.min(0) / sizes.elements)
    stop = np.minimum(count, np.floor((stops.max(0) - 1) / sizes.elements) + 1)
    needed = np.maximum(1, stop - begin)
    whole = np.floor(stops.min(0) / sizes.elements) - np.ceil(starts.max(0) / sizes.elements)
    return needed, needed - np.clip(whole, 0, needed)


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
        again = rates.start_time(tiles.ctas_of_cluster, tiles.ctas_of_cluster)
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
    return _Ends(float(rates.start_time(size, ctas)), first / share, drain)


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
