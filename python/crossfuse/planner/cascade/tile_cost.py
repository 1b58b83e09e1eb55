"""How long a stream of tiles takes: products, exponentials and memory at once, step by step.

::

    step  = products with exponentials and arithmetic beside them, and what a step costs of itself
    time  = start + maximum(fill + steps of the busiest CTA, memory + drain, ingest + drain)
            + store (of each tile) + merge and barrier (of clusters)

Products wait for the first tiles (fill), and the last tiles for products (drain). Two warpgroups
hide the exponentials of one behind the products of the other, but for a part: the time of both is
the root of the sum of squares, by which causal attention of 128 columns (R1) and of 64 have the
times that were measured. One warpgroup alone hides nothing.

Constants were fitted to `benchmarks/results/attention-variants-h100.txt`: R1 497 us, with 96 keys
a tile 542, 192 rows and 64 keys 614, all keys 932, window of 512 323, ALiBi 587, soft cap 758;
64 columns 351; R2 35 to 39, with 64 keys 44.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.cascade.rewrite.tiled.sizes import WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.tiled.work import TileWork
from crossfuse.hardware import Device
from crossfuse.planner.cascade.rates import LANES, SPECIAL, clock
from crossfuse.planner.cascade.tile_limits import at_once, step_bytes
from crossfuse.planner.cascade.tile_steps import Steps, steps_of
from crossfuse.planner.cost.loop import ingest_speed, overlapped
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.cost.start import start_time
from crossfuse.planner.cost.terms import Estimate

#: Microseconds of a step beside its arithmetic: barriers, rescaled sums, the head of the pipeline.
STEP = 0.12
#: Instructions of an element where masks are computed: indices, comparisons, selections. A window
#: has two masked tiles of five, and takes as much longer.
MASK = 8
#: Microseconds from the last step of a tile to the first of the next: quotients, boxes, stores.
TILE = 0.4
#: Microseconds of a CTA that merges what its cluster sent, beside what is sent. One sequence of
#: 8192 keys and 8 heads of them (R3:batch=1) took 14.5 us in clusters of 8, 10.7 of them memory's.
MERGE = 0.2


@dataclass(frozen=True)
class _Step:
    """Microseconds of one step of a CTA, part by part."""

    tensor: float
    special: float
    issue: float
    alone: bool

    def whole(self, *, special: bool = True, issue: bool = True) -> float:
        """Products with some of what goes on beside them."""
        beside = self.special * special + self.issue * issue
        if self.alone:
            return self.tensor + beside
        return float((self.tensor**2 + beside**2) ** 0.5)


@dataclass(frozen=True)
class _Ends:
    """Microseconds from the launch to the first loads, until they are there, and of a last step."""

    start: float
    fill: float
    drain: float


def tile_estimate(work: TileWork, tiles: CascadeTiles, device: Device, rates: Rates) -> Estimate:
    """Estimate a stream of tiles.

    Parameters
    ----------
    work : TileWork
        The cascade.
    tiles : CascadeTiles
        Sizes.
    device : Device
        Limits.
    rates : Rates
        Of the device.

    Returns
    -------
    Estimate
        Terms in microseconds.
    """
    found = steps_of(work, tiles)
    step, size, room = _step(work, found.sizes, rates), tiles.cluster, at_once(tiles, device)
    turns = -(-found.places // room)
    serial = _serial(found, room, size)
    even = found.total / min(found.places, room) / size
    masked = found.masked / max(1, found.total) * _masks(work, found.sizes, rates)
    moved = tile_bytes(work, tiles)
    busy = _memory(work, found, moved, serial, rates) | {"tensor": serial * step.tensor}
    busy |= {"exponentials": serial * step.special, "issue": serial * step.issue}
    within = (busy["hbm"], busy["l2"], busy["ingest"])
    ends = _ends(work, found, step, rates, min(room, found.places))
    whole = serial * (step.whole() + STEP + masked)
    late = [each + ends.drain for each in within]
    stages = (
        ("hbm", 0.0, within[:1]),
        ("ingest", 0.0, within),
        ("tensor", even * step.tensor, within),
        ("exponentials", even * step.whole(issue=False), within),
        ("issue", even * step.whole(), within),
        ("steps", even * (step.whole() + STEP), within),
        ("masks", even * (step.whole() + STEP + masked), within),
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
        again = start_time(rates, size, size)
        terms["waves"] += (turns - 1) * float(again)
        terms |= _merged(work, found, size, turns, rates)
    return Estimate({name: time for name, time in terms.items() if time}, busy)


def tile_bytes(work: TileWork, tiles: CascadeTiles) -> dict[str, int]:
    """Bytes that a stream of tiles moves by level: ``hbm``, ``l2``, ``dsm`` and ``shared``."""
    found = steps_of(work, tiles)
    sizes, rows = found.sizes, work.groups * work.rows
    pieces = _pieces(work, sizes)
    # What tiles side by side share is read once for all of them.
    brought = found.total * pieces * step_bytes(work, sizes) // max(1, tiles.share)
    if pieces == 1 and work.depth:
        brought += found.places * min(sizes.rows, work.rows) * work.depth * work.left
    size = max(1, tiles.cluster)
    states = found.places * size * min(sizes.rows, work.rows) * 4 * (work.slots + sizes.columns)
    return {
        "hbm": work.inputs + rows * work.result,
        "l2": brought + rows * work.result,
        # A CTA merges a slice of the columns of all.
        "dsm": states * (size - 1) // size,
        "shared": brought,
    }


def _step(work: TileWork, sizes: CascadeTiles, rates: Rates) -> _Step:
    elements = sizes.rows * sizes.elements
    tensor = 0.0
    if work.depth:
        rate = float(rates.tensor_rate(sizes.rows, sizes.elements, work.left))
        tensor += 2.0 * elements * work.depth / rate
    if sizes.columns:
        rate = float(rates.tensor_rate(sizes.rows, sizes.columns, work.item))
        tensor += 2.0 * elements * sizes.columns / rate
    cycle = clock(rates)
    return _Step(
        tensor,
        elements * work.exponentials / (SPECIAL * cycle),
        elements * work.operations / (LANES * cycle),
        sizes.rows <= WARPGROUP_ROWS,
    )


def _masks(work: TileWork, sizes: CascadeTiles, rates: Rates) -> float:
    """Microseconds of masks of one step."""
    return sizes.rows * sizes.elements * MASK / (LANES * clock(rates)) if work.masks else 0.0


def _serial(found: Steps, room: int, cluster: int) -> float:
    """Steps of the busiest CTA; those of tiles that differ are shared out, the longest first."""
    if found.even:
        return -(-found.places // room) * -(-found.longest // cluster)
    return max(found.total / min(found.places, room), found.longest) / cluster


def _memory(
    work: TileWork, found: Steps, moved: dict[str, int], serial: float, rates: Rates
) -> dict[str, float]:
    """Times of memory, L2 and of what the busiest CTA takes in, each alone."""
    measured = rates.measured
    written = moved["hbm"] - work.inputs
    own = serial * _pieces(work, found.sizes) * step_bytes(work, found.sizes)
    return {
        "hbm": work.inputs / measured.hbm_read + written / measured.hbm_write,
        "l2": moved["l2"] / (rates.fitted.l2 * measured.l2_read),
        "ingest": own / ingest_speed(rates),
    }


def _ends(work: TileWork, found: Steps, step: _Step, rates: Rates, clusters: int) -> _Ends:
    sizes = found.sizes
    size = max(1, sizes.cluster)
    ctas = clusters * size
    share = min(ingest_speed(rates), rates.measured.hbm_read / ctas)
    held = min(sizes.rows, work.rows) * work.depth * work.left
    first = step_bytes(work, sizes) + (held if sizes.depth == work.depth else 0)
    pieces = _pieces(work, sizes)
    drain = step.whole() / pieces + STEP
    return _Ends(float(start_time(rates, size, ctas)), first / share, drain)


def _pieces(work: TileWork, sizes: CascadeTiles) -> int:
    """Parts in which the depth of the first product is brought."""
    return -(-work.depth // sizes.depth) if sizes.depth else 1


def _merged(
    work: TileWork, found: Steps, cluster: int, turns: int, rates: Rates
) -> dict[str, float]:
    """States of a cluster: sent through DSM, met for, and merged."""
    sizes = found.sizes
    state = min(sizes.rows, work.rows) * 4 * (work.slots + sizes.columns)
    sent = state * (cluster - 1) / cluster / float(at(rates.measured.dsm_push, cluster))
    meeting = float(at(rates.measured.cluster_barrier, cluster))
    return {"merge": turns * (MERGE + sent), "barrier": turns * meeting}
