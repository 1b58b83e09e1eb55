"""The main loop of a phase: streams that overlap, and what each adds to those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.counts import Count, Share, ceil_div, least
from crossfuse.planner.kernels.phase import Phase

#: How well streams hide each other: 1 is not at all, infinity is all but the longest.
OVERLAP = 4.0


@dataclass(frozen=True)
class Streams:
    """Microseconds of what goes on at once in a phase, each stream as if alone."""

    #: What memory delivers to all SMs.
    hbm: Share
    #: What L2 delivers, each tile once for all CTAs that share it.
    l2: Share
    #: What the busiest SM takes in, and what it multiplies.
    ingest: Share
    tensor: Share
    #: The last two if work were spread evenly over all SMs of the device.
    even: tuple[Share, Share]


@dataclass(frozen=True)
class Load:
    """The clusters that run a phase, and how much of its operands must still come from memory."""

    #: CTAs of a cluster.
    cluster: Count
    #: Clusters that run at the same time.
    active: Count
    #: Bytes that are not in L2 yet.
    fresh: Share
    #: Bytes that each CTA has loaded before the phase begins.
    ahead: Share = 0.0


def streams(phase: Phase, load: Load, item: int, rates: Rates, sms: int) -> Streams:
    """Time the streams of a phase; `item` are bytes of an element."""
    fitted = rates.fitted
    turns = turns_of(phase, load.active)
    own = phase.steps * (phase.left + phase.right)
    shared = phase.left / phase.left_sharers + phase.right / phase.right_sharers
    ctas = phase.tiles * load.cluster
    early = load.ahead * least(load.active, phase.tiles) * load.cluster
    speed = ingest_speed(rates)
    work = 2.0 * phase.rows * phase.columns * phase.products * phase.depth * phase.steps
    tensor = work / (fitted.tensor * rates.tensor_rate(phase.rows, phase.columns, item))
    slowest = fitted.step * phase.steps
    asked = fitted.copy * phase.copies * phase.steps
    fresh = load.fresh * (1 + fitted.again * (phase.readers - 1))
    l2 = np.maximum(ctas * phase.steps * shared - early / phase.right_sharers, 0.0)
    return Streams(
        np.maximum(fresh - early / phase.right_sharers, 0.0) / memory_speed(rates),
        l2 / (fitted.l2 * rates.measured.l2_read),
        overlapped(turns * asked, np.maximum(turns * own - load.ahead, 0.0) / speed),
        turns * np.maximum(tensor, slowest),
        (
            overlapped(ctas * asked, np.maximum(ctas * own - early, 0.0) / speed) / sms,
            ctas * tensor / sms,
        ),
    )


def turns_of(phase: Phase, active: Count) -> Count:
    """Tiles that the busiest cluster makes."""
    return ceil_div(phase.tiles, least(active, phase.tiles))


def memory_speed(rates: Rates) -> float:
    """Bytes a microsecond that memory delivers to all SMs."""
    return rates.fitted.hbm * rates.measured.hbm_read


def ingest_speed(rates: Rates) -> float:
    """Bytes a microsecond that an SM takes in, of its own tiles or of those that others share.

    It is the same by multicast as alone (`Measured.multicast_ingest`): what all SMs take in
    together is bound by L2, which is another stream.
    """
    return rates.fitted.ingest * rates.measured.sm_ingest


def overlapped(*times: Share) -> Share:
    """Time that several streams take together: a soft maximum."""
    total = sum(np.maximum(each, 0.0) ** OVERLAP for each in times)
    return np.power(total, 1 / OVERLAP)


class Clock:
    """Adds up the terms of one `crossfuse.planner.cost.terms.Estimate`, phase by phase."""

    def __init__(self) -> None:
        self.terms: dict[str, Any] = {}
        self.busy: dict[str, Any] = {}

    def add(self, name: str, time: Share) -> None:
        """Add microseconds to a term."""
        self.terms[name] = self.terms.get(name, 0.0) + time

    def stream(self, name: str, time: Share) -> None:
        """Add microseconds of a stream during which no other has anything to do."""
        self.add(name, time)
        self.busy[name] = self.busy.get(name, 0.0) + time

    def loop(self, found: Streams, between: Share) -> Share:
        """Add a phase's loop, in which epilogues of its tiles block wgmma for `between` in all.

        The term of each stream is what it adds to those before it, so that the terms sum to the
        whole.
        """
        before: Share = 0.0
        even = (found.hbm, found.l2, *found.even)
        for number, name in enumerate(("hbm", "l2", "ingest", "tensor"), 1):
            after = overlapped(*even[:number])
            self.add(name, after - before)
            before = after
        whole = overlapped(found.hbm, found.l2, found.ingest, found.tensor + between)
        self.add("waves", whole - before)
        alone = (found.hbm, found.l2, found.ingest, found.tensor)
        for name, time in zip(("hbm", "l2", "ingest", "tensor"), alone, strict=True):
            self.busy[name] = self.busy.get(name, 0.0) + time
        return whole


# From the launch of a kernel to its first tiles or rows.

#: Microseconds of a start beyond the latency of memory, and for each time that there are twice as
#: many CTAs, of kernels that load rows: fitted to streams on H100s and H200s.
OF_ROWS = (0.68, 0.0623)


def start_time(
    rates: Rates, cluster: Count, ctas: Count, own: tuple[float, float] | None = None
) -> Share:
    """Microseconds until the first loads of a kernel arrive, of `ctas` that begin at the same time.

    The CTAs of a cluster meet first. `own` are microseconds beyond the latency of memory, and for
    each doubling of the CTAs; None takes those that were fitted to kernels with rings of tiles.
    """
    fitted, measured = rates.fitted, rates.measured
    late, crowd = own or (fitted.start, fitted.crowd)
    latency = measured.early_launch + measured.hbm
    together = latency + at(measured.cluster_barrier, cluster)
    return late + together + crowd * np.log2(ctas)
