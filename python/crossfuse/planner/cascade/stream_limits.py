"""What a stream takes of a multiprocessor: registers, shared memory, and so CTAs at once."""

from __future__ import annotations

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import Device

#: Registers beyond those of data and of a state of four numbers, and how many more than estimated
#: a kernel may need; with more than the limit it would spill.
BASE, MARGIN = 16, 1.2
_MAX_REGISTERS, _UNIT = 255, 8
#: Vectors that are loaded or unpacked at once behind a wait for peers.
_AT_ONCE = 2
_MAX_THREADS, _MAX_CTAS = 2048, 32
#: Shared memory that each CTA takes beyond its own, in bytes.
_RESERVED = 1024


def registers(work: Work, tiles: StreamTiles, least: bool = False) -> int:
    """Registers of a thread, estimated to what nvcc took for streams at the packaged sizes.

    Parameters
    ----------
    work : Work
        The cascade.
    tiles : StreamTiles
        Sizes.
    least : bool
        Whether kept elements stay packed; nvcc unpacks them all if registers allow, and nothing
        stands between what it moves: in clusters CTAs wait for each other there.

    Returns
    -------
    int
        What loads in flight, kept elements and the state take.
    """
    kept = work.held * steps(work, tiles) if tiles.resident == "registers" else 0
    if kept and work.reused and steps(work, tiles) <= tiles.unroll:
        return BASE + 2 * max(0, work.slots - 4) + work.reused * steps(work, tiles)
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
    return BASE + 2 * max(0, work.slots - 4) + max(sweep, emit)


def ragged(work: Work, tiles: StreamTiles) -> bool:
    """Whether threads have vectors that lie beyond the row."""
    return work.length % (tiles.threads * tiles.cluster * work.vector) != 0


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
