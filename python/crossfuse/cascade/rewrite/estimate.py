"""How long a stream takes: bytes over bandwidth, and what keeps a GPU from reaching it.

Constants were fitted to streams on an H100 SXM (CUDA graph, cold L2, medians of 15), and are good
for the order of tiles rather than for times; see docs/cascade-lowering.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import Device

#: Microseconds until a load under full traffic is there: 64 CTAs with 32 KiB of loads each took in
#: 2.59 TB/s of an H100's 3.1.
TURNAROUND = 0.8
#: Bytes a microsecond that one multiprocessor took in by ordinary loads, in the same run.
INGEST = 41e3
#: Microseconds of a CTA without loads at each of its rows, while states merge and the next CTA
#: starts, and what each warp adds. One CTA a multiprocessor loses all of them: 0.25 of softmax (a
#: row of 64 KiB that is written too), 0.97 of cross entropy (256 KiB that are only read).
IDLE, IDLE_OF_WARP = 0.4, 0.005
#: Part of the time that clusters add, and what each of their CTAs adds: all of them start together
#: and wait for the slowest. Softmax took 8 to 18 % longer in clusters of 2, 15 % in clusters of 4;
#: the variance of few rows 13, 21 and 37 % longer than its bytes in clusters of 4, 8 and 16.
CLUSTER, CLUSTER_CTA = 0.05, 0.02
#: Microseconds of a barrier of a cluster (`cluster_barrier` of the calibration).
BARRIER = 0.45
#: Bytes a microsecond of a multiprocessor's shared memory, and the part of its time that shows.
SHARED_RATE, SHARED_SHOWN = 218e3, 0.25
#: Part of L2 in which rows are found again: 60 % of a softmax that was read twice came from HBM
#: the second time, with 52 MB of rows at work.
USED_L2 = 0.35
#: Registers beyond those of data and of a state of four numbers, and how many more than estimated
#: a kernel may need; with more than the limit it would spill.
BASE, MARGIN = 16, 1.2
_MAX_REGISTERS, _UNIT = 255, 8
_MAX_THREADS, _MAX_CTAS = 2048, 32
#: Shared memory that each CTA takes beyond its own, in bytes.
_RESERVED = 1024


@dataclass(frozen=True)
class Rates:
    """Bytes a microsecond, as `crossfuse.planner.calibration.record.Measured` names them."""

    hbm_read: float
    hbm_write: float


def registers(work: Work, tiles: StreamTiles, least: bool = False) -> int:
    """Registers of a thread, estimated to what nvcc took for streams at the packaged sizes.

    Parameters
    ----------
    work : Work
        The cascade.
    tiles : StreamTiles
        Sizes.
    least : bool
        Whether kept elements stay packed; nvcc unpacks them all if registers allow.

    Returns
    -------
    int
        What loads in flight, kept elements and the state take.
    """
    kept = work.held * steps(work, tiles) if tiles.resident == "registers" else 0
    beside = work.swept - (work.held if kept else 0)
    sweep = kept + tiles.unroll * (beside + (work.swept if work.unpacked else 0))
    if work.unpacked and not least:
        sweep += kept
    loaded = work.emitted - (work.held if tiles.resident != "none" else 0)
    emit = kept + tiles.unroll * loaded if work.outputs else 0
    return BASE + 2 * max(0, work.slots - 4) + max(sweep, emit)


def steps(work: Work, tiles: StreamTiles) -> int:
    """Vectors of a thread."""
    return -(-work.length // (tiles.threads * tiles.cluster * work.vector))


def ctas(work: Work, tiles: StreamTiles, device: Device) -> int:
    """CTAs that a multiprocessor holds; 0 where a kernel would spill or not fit.

    Parameters
    ----------
    work : Work
        The cascade.
    tiles : StreamTiles
        Sizes.
    device : Device
        Limits.

    Returns
    -------
    int
        By threads, registers and shared memory.
    """
    threads = max(32, tiles.threads * tiles.rows)
    limit = min(_MAX_REGISTERS, device.registers // threads)
    if registers(work, tiles, least=True) * MARGIN > limit:
        return 0
    need = min(registers(work, tiles), limit)
    shared = shared_bytes(work, tiles) + _RESERVED
    if shared - _RESERVED > device.max_shared_bytes:
        return 0
    return min(
        _MAX_THREADS // threads,
        device.registers // (-(-need // _UNIT) * _UNIT * threads),
        (device.max_shared_bytes + _RESERVED) // shared,
        _MAX_CTAS,
    )


def shared_bytes(work: Work, tiles: StreamTiles) -> int:
    """Bytes of elements that a CTA keeps in shared memory."""
    if tiles.resident != "shared":
        return 0
    return work.kept * steps(work, tiles) * work.vector * tiles.threads * tiles.rows


def microseconds(work: Work, tiles: StreamTiles, device: Device, rates: Rates) -> float | None:
    """Time of a stream without its launch.

    Parameters
    ----------
    work : Work
        The cascade.
    tiles : StreamTiles
        Sizes.
    device : Device
        Limits.
    rates : Rates
        Bandwidths.

    Returns
    -------
    float | None
        Microseconds; None where a kernel would spill or not fit.
    """
    side = ctas(work, tiles, device)
    if side == 0:
        return None
    groups = -(-work.rows // tiles.rows)
    places = side * (device.sms if tiles.cluster == 1 else device.resident_clusters(tiles.cluster))
    waves = max(1.0, groups / places)
    together = min(side, -(-groups * tiles.cluster // device.sms))
    idle = IDLE + IDLE_OF_WARP * tiles.threads * tiles.rows / 32
    moved = _memory(work, tiles, min(groups, places), rates, device)
    alone = waves * (_alone(work, tiles, together) + idle)
    # While one CTA of a multiprocessor is idle the others load.
    found = max(moved, alone) + waves * idle / side
    if tiles.cluster > 1:
        found *= 1 + CLUSTER + CLUSTER_CTA * tiles.cluster
        found += waves * BARRIER
    if tiles.resident == "shared":
        share = groups * tiles.cluster / min(device.sms, groups * tiles.cluster)
        found += SHARED_SHOWN * share * 2 * shared_bytes(work, tiles) / SHARED_RATE
    return found


def _memory(work: Work, tiles: StreamTiles, running: int, rates: Rates, device: Device) -> float:
    """Microseconds of all bytes at the bandwidth of HBM."""
    elements = work.rows * work.length
    read = float(work.read + work.late)
    if work.outputs and tiles.resident == "none":
        rows = running * tiles.rows * work.length
        occupied = rows * (work.read + work.late + work.written)
        read += work.kept * max(0.0, 1 - USED_L2 * device.l2_bytes / max(1, occupied))
    return elements * (read / rates.hbm_read + work.written / rates.hbm_write)


def _alone(work: Work, tiles: StreamTiles, together: int) -> float:
    """Microseconds of a CTA for its rows where it waits for its own loads only.

    `together` CTAs share what a multiprocessor takes in.
    """
    total = steps(work, tiles)
    batches = -(-total // tiles.unroll)
    taken = work.fetched * total * tiles.threads * tiles.rows
    sweeps = 2 if work.outputs and tiles.resident == "none" else 1
    return sweeps * max(batches * TURNAROUND, together * taken / INGEST)
