"""Family ``stream``: a cascade as a stream of threads, in what tiles and under which rules.

Its resources and its time are in `crossfuse.planner.families.stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, log2
from typing import Any, ClassVar

from crossfuse.cascade.rewrite.tiles import RESIDENCES, StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import SM_CTAS, SM_THREADS, WARP, Device
from crossfuse.planner.cascade.shape import lanes_time, special_time
from crossfuse.planner.cost.rates import OF_ROWS, Rates, at
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import STREAM
from crossfuse.planner.families.family import CascadeFamily, Rule, Steps, Taken, keep_rules

# What a stream of threads takes of an SM, and how long: bytes over bandwidth, and what hinders
# it.
#
# ::
#
#     time = start + hbm + exponentials + issue + waiting      (a maximum: what each adds)
#            + merge + clusters + barrier + shared
#
# Where outputs over the axis wait for the state, so do all elements of a CTA: what it loads and
# what it computes follow each other, and the maximum is a smooth one (`with_outputs`).
#
# Constants were fitted to streams on H100s and H200s (CUDA graph, cold L2, medians of 15; most
# are in cascade-candidates-h100.jsonl, rows-candidates-h100.jsonl and rows-candidates-h200.jsonl
# of benchmarks/results). Of rows with outputs those near the best are 2 and 5 % off in the
# median, the first choice 3 and 6 % behind the best that was measured, on the H200 most of it
# where all rows together take 5 us. Estimates of sums alone are 17 % too short on an H200 where
# rows are few, 1 % on an H100. See docs/cascade-lowering.md.

# Resources of an SM that a stream takes: registers, shared memory, and so CTAs at once.

#: Registers beyond those of data and of a state of four numbers, and how many more than estimated
#: a kernel may need; with more than the limit it would spill.
BASE, MARGIN = 16, 1.2
_MAX_REGISTERS, _UNIT, _REGISTER = 255, 8, 4
#: Vectors that are loaded or unpacked at once behind a wait for peers.
_AT_ONCE = 2
#: Shared memory that each CTA takes beyond its own, in bytes.
RESERVED = 1024


def registers(work: Work, tiles: StreamTiles, least: bool = False) -> int:
    """Estimate the registers of a thread, as nvcc took them for streams at the packaged sizes.

    With `least`, elements kept in registers stay packed. nvcc unpacks them all if registers allow,
    unless something stands between what it moves: in clusters CTAs wait for each other there.
    """
    kept = work.held * steps(work, tiles) if tiles.resident == "registers" else 0
    around = BASE + 2 * max(0, work.slots - 4) + _ahead(work, tiles)
    if kept and work.reused and steps(work, tiles) <= tiles.unroll:
        return around + work.reused * steps(work, tiles)
    # Under conditions nvcc unpacks what is kept in front of the wait.
    waits = bool(kept) and tiles.cluster > 1 and not ragged(work, tiles)
    beside = work.swept - (work.held if kept else 0)
    at_once = min(tiles.unroll, _AT_ONCE) if waits else tiles.unroll
    sweep = kept + tiles.unroll * beside
    if work.unpacked:
        sweep += at_once * work.swept
        sweep += 0 if least or waits else kept
    loaded = work.emitted - (work.held if tiles.resident != "none" else 0)
    emit = kept + at_once * loaded if work.outputs else 0
    return around + max(sweep, emit)


def _ahead(work: Work, tiles: StreamTiles) -> int:
    """Registers of results that wait to be stored.

    Where results choose and all elements of a thread are taken in at once, nvcc asks for many
    conditions before it stores the first result. Of the gradient of cross entropy threads with 64
    elements take 127 registers in CTAs of 256, 95 in CTAs of 128, those with 32 take 63: as if half
    of the results waited.
    """
    if not work.chosen or steps(work, tiles) > tiles.unroll:
        return 0
    return steps(work, tiles) * work.vector * work.written // (2 * _REGISTER)


def ragged(work: Work, tiles: StreamTiles) -> bool:
    """Whether threads have vectors that lie beyond the row."""
    return work.length % (tiles.threads * tiles.cluster * work.vector) != 0


def steps(work: Work, tiles: StreamTiles) -> int:
    """Vectors of a thread."""
    return -(-work.length // (tiles.threads * tiles.cluster * work.vector))


def ctas(work: Work, tiles: StreamTiles, device: Device) -> int:
    """CTAs that an SM holds at once; 0 where a kernel would spill or not fit."""
    threads = max(WARP, tiles.threads * tiles.rows)
    limit = min(_MAX_REGISTERS, device.registers // threads)
    if registers(work, tiles, least=True) * MARGIN > limit:
        return 0
    need = min(registers(work, tiles), limit)
    shared = shared_bytes(work, tiles) + RESERVED
    if shared - RESERVED > device.max_shared_bytes:
        return 0
    return min(
        SM_THREADS // threads,
        device.registers // (-(-need // _UNIT) * _UNIT * threads),
        (device.max_shared_bytes + RESERVED) // shared,
        SM_CTAS,
    )


def shared_bytes(work: Work, tiles: StreamTiles) -> int:
    """Bytes of elements that a CTA keeps in shared memory."""
    if tiles.resident != "shared":
        return 0
    return work.kept * steps(work, tiles) * work.vector * tiles.threads * tiles.rows


# The time of a stream.

#: Microseconds until a load under full traffic is there: 64 CTAs with 32 KiB of loads each took in
#: 2.59 TB/s of an H100's 3.1.
TURNAROUND = 0.8
#: Bytes a microsecond that one multiprocessor takes in by ordinary loads: 64 CTAs with 64 KiB of
#: loads each read the variance of 64 rows at 2.96 TB/s.
INGEST = 47e3
#: Instructions of a thread for each number of the state and each round in which threads merge two
#: by two. Layer norm of 8192 columns, whose 4 numbers merge by divisions, takes 107 us with 512
#: threads a row and 190 to 224 with 1024, where 256 keep up with memory (92).
EXCHANGE = 18
#: Microseconds of a CTA without loads at each of its rows, while states merge and the next CTA
#: starts, and what each warp adds. One CTA a multiprocessor loses all of them: 0.25 of softmax (a
#: row of 64 KiB that is written too), 0.97 of cross entropy (256 KiB that are only read).
IDLE, IDLE_OF_WARP = 0.4, 0.005
#: Part of the time that each CTA of a cluster adds, since all of them wait for the slowest, and
#: what clusters add that do not run all at once: they wait for room together. The variance of few
#: rows took 1 to 3 % longer than its bytes in clusters of 2, 5 of 4, 9 of 8; softmax of many rows
#: 5 % longer in clusters of 2, and 12 of 4.
CLUSTER_CTA, CLUSTER_WAVES = 0.012, 0.03
#: Bytes a microsecond of a multiprocessor's shared memory.
SHARED_RATE = 218e3
#: Microseconds of a CTA for each of its warps, and for each number of the state and each round in
#: which threads merge two by two.
WARP_STAYS, ROUND = 0.0378, 0.019
#: Microseconds that the CTAs of a cluster wait for each other, for each time that there are twice
#: as many, and how much longer they compute, since what is uneven adds up.
MEET, UNEVEN = 0.278, 0.543
#: Instructions for each operation and each exponential of an element, and of taking one of two out
#: of a register.
PER_OPERATION, PER_EXPONENTIAL, UNPACK = 2.12, 0.77, 1.32
#: Threads of a multiprocessor below which each waits for its own results, and computes no faster
#: than among so many. A layer norm of one row of 1024 columns takes 2.9 us with 16 threads, 2.4
#: with 32.
FEWEST = 152
#: How much of the last wave is lost in which few CTAs run: 173 rows of 194 thousand columns take
#: 32 us in CTAs of which one fits a multiprocessor, and 23 in clusters of two with three.
LAST_WAVE = 0.805
#: How sharply the longer of two decides, what memory takes of a wave of CTAs or what one of them
#: takes that has memory for itself: a maximum is too low where they are close.
SHARPNESS = 4.74
#: Part of the time of memory that a CTA with a multiprocessor for itself adds: nobody loads while
#: it computes. Halves of rows of 128 KiB take 162 us in CTAs of which one fits, quarters 132,
#: of which three fit (softmax of 2048 rows on an H200).
LONE = 0.297
#: Part of the time that reads and writes together take longer than each at its own rate.
MIXED = 0.0685
#: Microseconds of a batch of loads behind the first.
BATCH = 0.287
#: Part of shared memory's time that shows: 1.2 fits an H200; an H100, whose memory is slower, hides
#: all of it in softmaxes, and is told up to 12 % too much. Kernels that were measured loaded 16-bit
#: elements one by one, which takes eight times as long as by vectors: what takes vectors was not
#: timed yet, but for float32 (a residual of 2048 x 32768: 381 us on an H200, estimated 393).
SHOWN = 1.0
#: Microseconds in which a multiprocessor begins a CTA: 16384 rows of 4 KiB take 48 us by one CTA
#: each, and 34 by CTAs of two rows or eight.
BEGIN = 0.275
#: Microseconds of a start beyond the latency of memory, of sums alone.
LATE_SUMS = 0.4
#: Part of the time that each CTA of the only wave of clusters adds.
LAST = 0.0155
#: Part of L2 in which all rows are found again, and how fast the share of those that are not grows
#: beyond: 60 % of a softmax that was read twice came from HBM the second time, with 52 MB of rows
#: at work; of a layer norm with 69 MB nearly all of it.
USED_L2, LOST_L2 = 0.4, 1.5


@dataclass(frozen=True)
class Waves:
    """CTAs of a stream: `side` on an SM, `places` groups of rows at once."""

    side: int
    groups: int
    places: int


def stream_estimate(work: Work, tiles: StreamTiles, device: Device, rates: Rates) -> Estimate:
    """Estimate a stream of threads with tiles that fit: see `ctas`."""
    waves = waves_of(work, tiles, device)
    if work.outputs:
        return with_outputs(work, tiles, waves, device, rates)
    idle = IDLE + IDLE_OF_WARP * tiles.threads * tiles.rows / WARP
    together = min(waves.side, -(-waves.groups * tiles.cluster // device.sms))
    busy = {
        "hbm": _memory(work, tiles, waves, rates, device),
        "exponentials": special_time(work.rows * work.length * work.exponentials, device, rates),
        "issue": lanes_time(_instructions(work, tiles), device, rates),
    }
    count = _rounds(waves.groups * tiles.cluster, together, device)
    computed = _computed(work, tiles, together, device, rates)
    alone = count * (max(_alone(work, tiles, together), computed) + idle)
    terms, reached = _maximum({**busy, "waiting": alone})
    # While one CTA of a multiprocessor is idle the others load.
    terms["merge"] = count * idle / waves.side
    if tiles.cluster > 1:
        share = CLUSTER_CTA * tiles.cluster + CLUSTER_WAVES * (count > 1)
        terms["clusters"] = share * (reached + terms["merge"])
        terms["barrier"] = count * float(at(rates.measured.cluster_barrier, tiles.cluster))
    running = min(waves.groups, waves.places) * tiles.cluster
    terms["start"] = float(rates.start_time(tiles.cluster, running, (LATE_SUMS, OF_ROWS[1])))
    return Estimate({name: time for name, time in terms.items() if time}, busy)


def with_outputs(
    work: Work, tiles: StreamTiles, waves: Waves, device: Device, rates: Rates
) -> Estimate:
    """Estimate a stream with outputs over the axis."""
    elements = steps(work, tiles) * work.vector  # of a thread
    launched = waves.groups * tiles.cluster
    busy = {
        "hbm": _memory(work, tiles, waves, rates, device),
        "exponentials": special_time(work.rows * work.length * work.exponentials, device, rates),
        "issue": lanes_time(
            launched * tiles.threads * tiles.rows * elements * _operations(work, tiles),
            device,
            rates,
        ),
        "launches": BEGIN * launched / device.sms,
    }
    terms, reached = _maximum(busy)
    if tiles.resident == "shared":
        each = launched / min(device.sms, launched)
        terms["shared"] = SHOWN * each * 2 * shared_bytes(work, tiles) / SHARED_RATE
        reached += terms["shared"]
    together = min(waves.side, -(-launched // device.sms))
    read = LONE * reached if together == 1 and launched > device.sms else 0.0
    count = _rounds(launched, together, device)
    computed = _computed(work, tiles, together, device, rates)
    alone = computed + _waited(work, tiles)
    by_itself = _longer(reached, read + count * alone)
    terms["waiting"] = by_itself - reached
    if tiles.cluster > 1:
        alone += MEET * log2(tiles.cluster) + UNEVEN * computed
        last = LAST * tiles.cluster * reached * (count == 1)
        terms["clusters"] = _longer(reached, read + count * alone) - by_itself + last
    running = min(waves.groups, waves.places) * tiles.cluster
    terms["start"] = float(rates.start_time(tiles.cluster, running, OF_ROWS))
    return Estimate({name: time for name, time in terms.items() if time}, busy)


def _maximum(times: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """What each time adds to the longest of those before it, and the longest of all."""
    terms, reached = {}, 0.0
    for name, time in times.items():
        terms[name] = max(0.0, time - reached)
        reached = max(reached, time)
    return terms, reached


def _rounds(launched: int, together: int, device: Device) -> float:
    """Waves of `together` CTAs of an SM; a last wave that is not full costs more than its share."""
    count = max(1.0, launched / (device.sms * together))
    return count + LAST_WAVE * (ceil(count) - count)


def _operations(work: Work, tiles: StreamTiles) -> float:
    """Instructions per element."""
    reuses = work.reused and tiles.resident == "registers" and steps(work, tiles) <= tiles.unroll
    found = PER_OPERATION * (work.operations - (work.spared if reuses else 0))
    return found + PER_EXPONENTIAL * work.exponentials + UNPACK * work.unpacked


def _computed(work: Work, tiles: StreamTiles, together: int, device: Device, rates: Rates) -> float:
    """Microseconds in which `together` CTAs of an SM compute."""
    threads = -(-tiles.threads * tiles.rows // WARP) * WARP
    lanes = max(together * threads, FEWEST) * device.sms
    elements = steps(work, tiles) * work.vector
    return lanes_time(lanes * elements * _operations(work, tiles), device, rates)


def _waited(work: Work, tiles: StreamTiles) -> float:
    """Microseconds in which a CTA waits for loads, and merges states."""
    batches = -(-steps(work, tiles) // tiles.unroll)
    sweeps = 2 if tiles.resident == "none" else 1
    merged = ROUND * work.slots * log2(max(2, tiles.threads))
    warps = max(1.0, tiles.threads * tiles.rows / WARP)
    return sweeps * (batches - 1) * BATCH + WARP_STAYS * warps + merged


def _longer(one: float, other: float) -> float:
    """Time of two things at once: hardly more than the longer."""
    return float((one**SHARPNESS + other**SHARPNESS) ** (1 / SHARPNESS))


def stream_bytes(work: Work, tiles: StreamTiles, device: Device) -> dict[str, int]:
    """Bytes that a stream moves by level: ``hbm``, ``l2``, ``dsm`` and ``shared``."""
    elements = work.rows * work.length
    waves = waves_of(work, tiles, device)
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


def waves_of(work: Work, tiles: StreamTiles, device: Device) -> Waves:
    """Count the groups of rows of a stream, and how many of them a device works on at once."""
    side = ctas(work, tiles, device)
    places = side * device.resident_clusters(tiles.cluster)
    return Waves(side, -(-work.rows // tiles.rows), places)


def _memory(work: Work, tiles: StreamTiles, waves: Waves, rates: Rates, device: Device) -> float:
    """Microseconds of all bytes at the bandwidth of HBM."""
    elements = work.rows * work.length
    read = float(work.read + work.late)
    if work.outputs and tiles.resident == "none":
        read += work.kept * _missed(work, tiles, waves, device)
    measured = rates.measured
    time = elements * (read / measured.hbm_read + work.written / measured.hbm_write)
    return time * (1 + MIXED) if work.outputs else time


def _instructions(work: Work, tiles: StreamTiles) -> float:
    """Instructions of all threads: elements of all rows, and states that merge."""
    threads = tiles.threads * tiles.cluster
    merged = threads * log2(tiles.threads) * work.slots * EXCHANGE
    return work.rows * (work.length * work.operations + merged)


def _missed(work: Work, tiles: StreamTiles, waves: Waves, device: Device) -> float:
    """Share of what is loaded again that L2 does not have any more."""
    rows = min(waves.groups, waves.places) * tiles.rows * work.length
    occupied = rows * (work.read + work.late + work.written)
    lost = LOST_L2 * (1 - USED_L2 * device.l2_bytes / max(1, occupied))
    return min(1.0, max(0.0, lost))


def _alone(work: Work, tiles: StreamTiles, together: int) -> float:
    """Microseconds of a CTA for its rows if it waits only for its own loads.

    `together` CTAs share what an SM takes in.
    """
    total = steps(work, tiles)
    batches = -(-total // tiles.unroll)
    taken = work.fetched * total * tiles.threads * tiles.rows
    return max(batches * TURNAROUND, together * taken / INGEST)


#: Places of elements that outputs need again, by `StreamTiles.resident`.
_RESIDENT = {"registers": "registers", "shared": "shared memory", "none": "L2"}


_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_UNROLLS = (1, 2, 4, 8, 16)
_CLUSTERS = (1, 2, 4, 8, 16)
#: Threads of a CTA with several rows.
_SIDE_BY_SIDE = (64, 128, 256)
#: Threads that a row has at least, unless its elements are few.
_LONG = 128
#: Vectors of a thread up to which elements are few.
_FEW = 8
#: Bytes of a line of L2, which neighbouring threads read at once.
_LINE = 128
#: Registers of kept elements at most; loops over them are unrolled whole. More were not measured.
_HELD = 32
#: Bytes of a thread in flight at most, as many as were measured.
_LOADED = 128
#: Bytes of a load that is not narrow.
_WIDE = 16
#: Rows for each multiprocessor from which on clusters have nothing to fill.
_FULL = 2
#: Threads of the most usual CTA.
_THREADS_OF_CTA = 256


class Stream(CascadeFamily[StreamTiles, Work]):
    """Threads that take in a row, and merge what they have of it."""

    name: ClassVar[str] = STREAM
    text: ClassVar[str] = "a cascade as a stream of threads"
    form: ClassVar[str] = "Stream of threads"
    rule: ClassVar[str] = "stream.schedule_stream"
    kind: ClassVar[Any] = StreamTiles
    streams: ClassVar[Any] = Work
    axes: ClassVar[tuple[str, ...]] = ("threads", "unroll", "cluster", "rows", "resident")
    second: ClassVar[tuple[str, ...]] = ("unroll", "resident")
    state_places: ClassVar[Mapping[str, str]] = {
        "registers": "states in registers",
        "dsm": "states in DSM",
    }

    def candidates(self, device: Device) -> tuple[Steps, tuple[StreamTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        return keep_rules(_all(self.work), _rules(self.work, device))

    def time(self, tiles: StreamTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return stream_estimate(self.work, tiles, device, rates)

    @property
    def equal(self) -> float:
        """Estimates closer than this ratio are equal."""
        return 1.005 if self.work.outputs else 1.02

    def preference(self, time: float, tiles: StreamTiles) -> tuple[float, ...]:
        """Order tiles of equal times: without clusters first, then the most usual CTAs.

        Rows that stay in registers are loaded by as many threads as there can be, unless each load
        is a narrow one.
        """
        unusual = abs(log2(tiles.threads * tiles.rows / _THREADS_OF_CTA))
        residence = RESIDENCES.index(tiles.resident)
        at_once = tiles.resident == "registers" and self.work.fetched >= _WIDE
        batch = tiles.unroll if at_once else -tiles.unroll
        return (tiles.cluster > 1, unusual, tiles.cluster, residence, batch, -tiles.threads)

    def moved(self, tiles: StreamTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return stream_bytes(self.work, tiles, device)

    def place_of(self, tiles: StreamTiles) -> str:
        """Describe where states and elements are stored."""
        state = "DSM" if tiles.cluster > 1 else "registers"
        if self.work.outputs:
            return f"states in {state}, elements in {_RESIDENT[tiles.resident]}"
        return f"states in {state}"

    def taken(self, tiles: StreamTiles, device: Device) -> Taken:
        """Resources of the device that a kernel takes."""
        work, size = self.work, tiles.cluster
        waves = waves_of(work, tiles, device)
        return Taken(
            waves.groups * size,
            size,
            max(WARP, tiles.threads * tiles.rows),
            waves.side,
            registers(work, tiles),
            shared_bytes(work, tiles),
            round(max(1.0, waves.groups / waves.places), 2),
        )

    def computed(self, tiles: StreamTiles) -> dict[str, int]:
        """Instructions for each element."""
        return instructions(self.work)


def _all(work: Work) -> list[StreamTiles]:
    """List tiles before any rule.

    Several rows share a CTA where one keeps no full CTA at work. Several CTAs share a row where
    there are too few rows to fill the SMs, or where elements that outputs need again stay in more
    room than a CTA has. No thread is without elements, if one of half as many is not.
    """
    residences = ["none"]
    if work.outputs and work.kept:
        residences += ["shared", "registers"]
    found = []
    for threads, cluster, resident, unroll in product(_THREADS, _CLUSTERS, residences, _UNROLLS):
        for rows in _rows(work, threads, cluster):
            found.append(StreamTiles(threads, 0, unroll, cluster, rows, resident))
    return found


def _rows(work: Work, threads: int, cluster: int) -> tuple[int, ...]:
    """Numbers of rows that a CTA can have."""
    if cluster > 1 or threads >= _LONG:
        return (1,)
    return tuple(sorted({gcd(work.rows, max(1, size // threads)) for size in _SIDE_BY_SIDE}))


def _rules(work: Work, device: Device) -> tuple[Rule[StreamTiles], ...]:
    few = work.rows < _FULL * device.sms
    along = work.outputs and work.kept > 0

    def shared_out(tiles: StreamTiles) -> bool:
        threads = tiles.threads * tiles.cluster
        return threads == 1 or work.length > threads * work.vector // 2

    def loads(tiles: StreamTiles) -> bool:
        few_vectors = tiles.unroll < 2 * steps(work, tiles)
        narrow = tiles.unroll * work.fetched < _WIDE and tiles.threads > WARP
        # Of a short row there may be no more to load.
        if narrow and work.outputs and tiles.unroll < steps(work, tiles):
            return False
        return tiles.unroll == 1 or (few_vectors and tiles.unroll * work.fetched <= _LOADED)

    def short(tiles: StreamTiles) -> bool:
        total = steps(work, tiles)
        lines = tiles.threads * work.fetched >= _LINE or total == 1
        return tiles.threads >= _LONG or (total <= _FEW and lines)

    def kept(tiles: StreamTiles) -> bool:
        total = steps(work, tiles)
        held = total * work.held <= _HELD and total <= tiles.unroll
        return tiles.resident != "registers" or held

    def clusters(tiles: StreamTiles) -> bool:
        inside = tiles.cluster <= device.max_cluster
        return tiles.cluster == 1 or ((few or along) and tiles.threads >= _LONG and inside)

    return (
        (
            "clusters",
            f"clusters for fewer than {_FULL} rows an SM or outputs over the axis, of 128 threads",
            clusters,
        ),
        ("threads", "no thread is without elements", shared_out),
        ("short", "a warp or two for rows of few vectors alone", short),
        ("flight", f"loads in flight: what there is, and {_LOADED} bytes a thread", loads),
        ("kept", f"elements kept in {_HELD} registers are loaded at once", kept),
        ("fits", "registers without spills, shared memory", lambda t: ctas(work, t, device) > 0),
    )
