"""Family ``stream``: a cascade as a stream of threads, in what tiles and under which rules.

Its resources and its time are in `crossfuse.planner.cascade.stream_cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import gcd, log2
from typing import Any, ClassVar

from crossfuse.cascade.rewrite.tiles import RESIDENCES, StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import WARP, Device
from crossfuse.planner.cascade.stream_cost import (
    ctas,
    registers,
    shared_bytes,
    steps,
    stream_bytes,
    stream_estimate,
    waves_of,
)
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import STREAM
from crossfuse.planner.families.cascade import CascadeFamily, Rule, Steps, Taken, keep_rules

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
