"""Tiles of a stream, the best first."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, log, log2
from typing import TYPE_CHECKING

from crossfuse.cascade.rewrite.estimate import Rates, microseconds, steps
from crossfuse.cascade.rewrite.refusal import refused
from crossfuse.cascade.rewrite.tiles import RESIDENCES, StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site

_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_UNROLLS = (1, 2, 4, 8, 16)
_CLUSTERS = (2, 4, 8, 16)
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
#: Rows for each multiprocessor from which on clusters have nothing to fill.
_FULL = 2
#: Estimates closer than this are equal; of equal ones CTAs of this size come first.
_EQUAL, _THREADS_OF_CTA = 1.02, 256


def choose_tiles(
    site: Site, derivation: Derivation, device: str | Device = "nvidia-h100"
) -> tuple[StreamTiles, ...]:
    """Tiles that a stream can have, in the order of their estimated times.

    Parameters
    ----------
    site : Site
        The cascade in its function.
    derivation : Derivation
        How it streams.
    device : str | Device
        Target name, see `crossfuse.hardware.device`.

    Returns
    -------
    tuple[StreamTiles, ...]
        The best first; none of them is expected to spill registers.

    Raises
    ------
    CascadeRefused
        If no tiles fit.
    """
    from crossfuse.cascade.rewrite.work import work_of
    from crossfuse.hardware import device as named
    from crossfuse.planner.calibration.record import measured

    limits = named(device)
    known = measured(limits.name)
    rates = Rates(known.hbm_read, known.hbm_write)
    return ranked(work_of(site, derivation), limits, rates)


def ranked(work: Work, device: Device, rates: Rates) -> tuple[StreamTiles, ...]:
    """Tiles of counted work, see `choose_tiles`."""
    found: list[tuple[float, StreamTiles]] = []
    for tiles in candidates(work, device):
        time = microseconds(work, tiles, device, rates)
        if time is not None:
            found.append((time, tiles))
    if not found:
        raise refused(
            "tiles",
            f"{work.swept} registers for a vector of {work.vector} elements, {work.slots} slots",
            "tiles that fit a multiprocessor without spilling registers",
            "pass the tiles, or split the cascade",
        )
    best = min(time for time, _ in found)
    return tuple(each for _, each in sorted(found, key=lambda pair: _key(pair[0], pair[1], best)))


def _key(time: float, tiles: StreamTiles, best: float) -> tuple[float, ...]:
    """Of equal times those without clusters come first, then the most usual CTAs."""
    beyond = int(log(time / best) / log(_EQUAL) + 1e-9)
    unusual = abs(log2(tiles.threads * tiles.rows / _THREADS_OF_CTA))
    residence = RESIDENCES.index(tiles.resident)
    return (beyond, tiles.cluster, unusual, -tiles.unroll, residence, tiles.threads)


def candidates(work: Work, device: Device) -> Iterator[StreamTiles]:
    """Tiles that make sense for the shape of the work.

    Several rows share a CTA where one keeps no full CTA at work. Several CTAs share a row where
    there are too few rows to fill the multiprocessors. No thread is without elements, if one of
    half as many is not.

    Parameters
    ----------
    work : Work
        The cascade.
    device : Device
        Limits.

    Yields
    ------
    StreamTiles
        With a state of threads in one warp where rows stand side by side.
    """
    residences = ["none"]
    if work.outputs and work.kept:
        residences += ["shared", "registers"]
    for threads in _THREADS:
        for cluster in (1, *_CLUSTERS):
            if cluster > 1 and (work.rows >= _FULL * device.sms or threads < 128):
                continue
            for rows in _rows(work, threads, cluster):
                for resident in residences:
                    if resident == "registers" and cluster > 1:
                        continue
                    yield from _unrolled(work, threads, cluster, rows, resident)


def _unrolled(
    work: Work, threads: int, cluster: int, rows: int, resident: str
) -> Iterator[StreamTiles]:
    for unroll in _UNROLLS:
        tiles = StreamTiles(threads, 0, unroll, cluster, rows, resident)
        total = steps(work, tiles)
        if unroll > 1 and (unroll >= 2 * total or unroll * work.fetched > _LOADED):
            return
        if threads < _LONG and (total > _FEW or (threads * work.fetched < _LINE and total > 1)):
            return
        if threads * cluster > 1 and work.length <= threads * cluster * work.vector // 2:
            return
        if resident != "registers" or total * work.held <= _HELD:
            yield tiles


def _rows(work: Work, threads: int, cluster: int) -> tuple[int, ...]:
    """Rows of a CTA."""
    if cluster > 1 or threads >= _LONG:
        return (1,)
    return tuple(sorted({gcd(work.rows, max(1, size // threads)) for size in _SIDE_BY_SIDE}))
