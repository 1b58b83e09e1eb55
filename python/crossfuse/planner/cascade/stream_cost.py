"""How long a stream of threads takes: bytes over bandwidth, and what keeps a GPU from reaching it.

::

    time = start + hbm + exponentials + issue + waiting + clusters + shared

The first four are what each adds to the longest so far; waiting is what CTAs add that have to wait
for their own loads and merges, clusters what they add by waiting for each other.

Constants were fitted to streams on an H100 SXM (CUDA graph, cold L2, medians of 15; most are in
benchmarks/results/cascade-candidates-h100.jsonl), and are good for the order of tiles rather than
for times; see docs/cascade-lowering.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import WARP, Device
from crossfuse.planner.cascade.rates import lanes_time, special_time
from crossfuse.planner.cascade.stream_limits import ctas, shared_bytes, steps
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.start import start_time
from crossfuse.planner.cost.terms import Estimate

#: Microseconds until a load under full traffic is there: 64 CTAs with 32 KiB of loads each took in
#: 2.59 TB/s of an H100's 3.1.
TURNAROUND = 0.8
#: Bytes a microsecond that one multiprocessor takes in by ordinary loads.
INGEST = 100e3
#: Microseconds of a CTA for each of its warps, and for each number of the state and each round in
#: which threads merge two by two.
IDLE_OF_WARP, ROUND = 0.006, 0.016
#: Microseconds that the CTAs of a cluster wait for each other, for two of them and for each time
#: that there are twice as many; and how much longer they compute, since what is uneven adds up.
MEET, MEET_TWICE, UNEVEN = 0.02, 0.436, 1.02
#: Instructions for each operation of an element.
PER_OPERATION = 1.56
#: Part of the time that each CTA of a cluster adds where no other cluster follows it: variances of few
#: rows took 1 to 3 % longer than their bytes in clusters of 2, 5 of 4, 9 of 8.
LAST = 0.012
#: How sharply the longer of two decides, what memory takes of a wave of CTAs or what one of them
#: takes that has memory for itself: a maximum is too low where they are close.
SHARPNESS = 4
#: Part of the time that a CTA adds which has a multiprocessor for itself, and nobody to load while it
#: merges and stores.
LONE = 0.02
#: Part of the time that reads and writes together take longer than each at its own rate.
MIXED = 0.059
#: Bytes a microsecond of a multiprocessor's shared memory, and the part of its time that shows.
SHARED_RATE, SHARED_SHOWN = 218e3, 0.33
#: Part of L2 in which rows are found again: 60 % of a softmax that was read twice came from HBM
#: the second time, with 52 MB of rows at work.
USED_L2 = 0.35


@dataclass(frozen=True)
class _Waves:
    """CTAs of a stream: `side` on a multiprocessor, `places` groups of rows at once."""

    side: int
    groups: int
    places: int

    @property
    def count(self) -> float:
        return max(1.0, self.groups / self.places)


def stream_estimate(work: Work, tiles: StreamTiles, device: Device, rates: Rates) -> Estimate:
    """Estimate a stream of threads.

    Parameters
    ----------
    work : Work
        The cascade.
    tiles : StreamTiles
        Sizes that fit, see `crossfuse.planner.cascade.stream_limits.ctas`.
    device : Device
        Limits.
    rates : Rates
        Of the device.

    Returns
    -------
    Estimate
        Terms in microseconds.
    """
    waves = _waves(work, tiles, device)
    busy = {
        "hbm": _memory(work, tiles, waves, rates, device),
        "exponentials": special_time(work.rows * work.length * work.exponentials, device, rates),
        "issue": lanes_time(_instructions(work, tiles), device, rates),
    }
    terms: dict[str, float] = {}
    reached = 0.0
    for name, time in busy.items():
        terms[name] = max(0.0, time - reached)
        reached = max(reached, time)
    ctas = waves.groups * tiles.cluster
    together = min(waves.side, -(-ctas // device.sms))
    count = max(1.0, ctas / (device.sms * together))
    computed = together * lanes_time(_of_cta(work, tiles), device, rates) * device.sms
    alone = _alone(work, tiles, together, computed)
    by_itself = _longer(reached, count * alone)
    terms["waiting"] = by_itself - reached + LONE * reached * (together == 1 < count)
    if tiles.cluster > 1:
        alone += MEET + MEET_TWICE * log2(tiles.cluster) + UNEVEN * computed
        last = LAST * tiles.cluster * reached * (count == 1)
        terms["clusters"] = _longer(reached, count * alone) - by_itself + last
    if tiles.resident == "shared":
        each = waves.groups * tiles.cluster / min(device.sms, waves.groups * tiles.cluster)
        terms["shared"] = SHARED_SHOWN * each * 2 * shared_bytes(work, tiles) / SHARED_RATE
    running = min(waves.groups, waves.places) * tiles.cluster
    terms["start"] = float(start_time(rates, tiles.cluster, running))
    return Estimate({name: time for name, time in terms.items() if time}, busy)


def _longer(one: float, other: float) -> float:
    """Both at once: hardly more than the longer."""
    return float((one**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS))


def stream_bytes(work: Work, tiles: StreamTiles, device: Device) -> dict[str, int]:
    """Bytes that a stream moves by level: ``hbm``, ``l2``, ``dsm`` and ``shared``."""
    elements = work.rows * work.length
    waves = _waves(work, tiles, device)
    again = work.kept if work.outputs and tiles.resident == "none" else 0
    read = work.read + work.late
    missed = again * _missed(work, tiles, waves, device)
    states = 4 * work.slots * work.rows * tiles.cluster
    return {
        "hbm": int(elements * (read + missed + work.written)),
        "l2": elements * (read + again + work.written),
        # Every CTA of a cluster reads the states of all others.
        "dsm": states * (tiles.cluster - 1),
        "shared": 2 * elements * work.kept if tiles.resident == "shared" else 0,
    }


def _waves(work: Work, tiles: StreamTiles, device: Device) -> _Waves:
    side = ctas(work, tiles, device)
    places = side * device.resident_clusters(tiles.cluster)
    return _Waves(side, -(-work.rows // tiles.rows), places)


def _memory(work: Work, tiles: StreamTiles, waves: _Waves, rates: Rates, device: Device) -> float:
    """Microseconds of all bytes at the bandwidth of HBM."""
    elements = work.rows * work.length
    read = float(work.read + work.late)
    if work.outputs and tiles.resident == "none":
        read += work.kept * _missed(work, tiles, waves, device)
    measured = rates.measured
    time = elements * (read / measured.hbm_read + work.written / measured.hbm_write)
    return time * (1 + MIXED * bool(work.written))


def _instructions(work: Work, tiles: StreamTiles) -> float:
    """Of all threads."""
    return work.rows / tiles.rows * tiles.cluster * _of_cta(work, tiles)


def _of_cta(work: Work, tiles: StreamTiles) -> float:
    """Of the threads of a CTA."""
    elements = steps(work, tiles) * work.vector * tiles.threads * tiles.rows
    reuses = work.reused and tiles.resident == "registers" and steps(work, tiles) <= tiles.unroll
    return PER_OPERATION * (work.operations - (work.spared if reuses else 0)) * elements


def _missed(work: Work, tiles: StreamTiles, waves: _Waves, device: Device) -> float:
    """Share of what is loaded again that L2 does not have any more."""
    rows = min(waves.groups, waves.places) * tiles.rows * work.length
    occupied = rows * (work.read + work.late + work.written)
    return max(0.0, 1 - USED_L2 * device.l2_bytes / max(1, occupied))


def _alone(work: Work, tiles: StreamTiles, together: int, computed: float) -> float:
    """Microseconds of a CTA for its rows, `together` of which share what an SM takes in."""
    total = steps(work, tiles)
    batches = -(-total // tiles.unroll)
    taken = work.fetched * total * tiles.threads * tiles.rows
    sweeps = 2 if work.outputs and tiles.resident == "none" else 1
    waited, carried = (batches - 1) * TURNAROUND, together * taken / INGEST
    loaded = sweeps * max(waited, carried)
    warps = max(1.0, tiles.threads * tiles.rows / WARP)
    merged = ROUND * work.slots * log2(max(2, tiles.threads))
    longer, shorter = max(loaded, computed), min(loaded, computed)
    # What stays is awaited whole; of a long stream a batch is loaded while others are computed.
    rest = shorter / batches if tiles.resident == "none" else shorter + min(waited, carried)
    return longer + rest + IDLE_OF_WARP * warps + merged
