"""Tiles of a stream of threads, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import gcd, log, log2

from crossfuse.cascade.rewrite.tiles import RESIDENCES, StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import WARP, Device
from crossfuse.planner.space.count import Step

# Resources of an SM that a stream takes: registers, shared memory, and so CTAs at once.

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
    """Estimate the registers of a thread, as nvcc took them for streams at the packaged sizes.

    With `least`, elements kept in registers stay packed. nvcc unpacks them all if registers allow,
    unless something stands between what it moves: in clusters CTAs wait for each other there.
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
    """CTAs that an SM holds at once; 0 where a kernel would spill or not fit."""
    threads = max(WARP, tiles.threads * tiles.rows)
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
#: Estimates closer than this are equal, the second with outputs over the axis; of equal ones CTAs
#: of this size come first.
_EQUAL, _EQUAL_ALONG, _THREADS_OF_CTA = 1.02, 1.005, 256

#: A rule: its name, what it keeps in words, and whether tiles keep it.
Rule = tuple[str, str, Callable[[StreamTiles], bool]]


def stream_tiles(work: Work, device: Device) -> tuple[tuple[Step, ...], tuple[StreamTiles, ...]]:
    """List the tiles that a stream can have without spills, and how many tiles each rule leaves.

    Several rows share a CTA where one keeps no full CTA at work. Several CTAs share a row where
    there are too few rows to fill the SMs, or where elements that outputs need again stay in more
    room than a CTA has. No thread is without elements, if one of half as many is not.
    """
    left = _all(work)
    counts = [Step("all", "tiles that are tried", len(left))]
    for name, text, keeps in _rules(work, device):
        left = [each for each in left if keeps(each)]
        counts.append(Step(name, text, len(left)))
    return tuple(counts), tuple(left)


def ordered(
    work: Work, times: Sequence[tuple[float, StreamTiles]]
) -> list[tuple[float, StreamTiles]]:
    """Sort tiles by their times, the best first.

    Of equal times those without clusters come first, then the most usual CTAs. Rows that stay in
    registers are loaded by as many threads as there can be, unless each load is a narrow one.
    """
    wide = work.fetched >= _WIDE
    equal = _EQUAL_ALONG if work.outputs else _EQUAL
    if not times:
        return []
    best = min(time for time, _ in times)

    def key(pair: tuple[float, StreamTiles]) -> tuple[float, ...]:
        time, tiles = pair
        beyond = int(log(time / best) / log(equal) + 1e-9)
        unusual = abs(log2(tiles.threads * tiles.rows / _THREADS_OF_CTA))
        residence = RESIDENCES.index(tiles.resident)
        batch = tiles.unroll if tiles.resident == "registers" and wide else -tiles.unroll
        return (beyond, tiles.cluster > 1, unusual, tiles.cluster, residence, batch, -tiles.threads)

    return sorted(times, key=key)


def _all(work: Work) -> list[StreamTiles]:
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


def _rules(work: Work, device: Device) -> tuple[Rule, ...]:
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
