"""The main loop of a phase: streams that overlap, and what each adds to those before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.counts import Count, Share, ceil_div, least
from crossfuse.planner.kernels.phase import Phase

#: How well streams hide each other: 1 is not at all, infinity is all but the longest.
OVERLAP = 4.0


@dataclass(frozen=True)
class Streams:
    """Times of what goes on at once in a phase, each as if alone; us.

    Attributes
    ----------
    hbm : Share
        What memory delivers to all SMs.
    l2 : Share
        What L2 delivers, each tile once for all CTAs that share it.
    ingest : Share
        What the busiest SM takes in.
    tensor : Share
        What the busiest SM multiplies.
    even : tuple[Share, Share]
        The last two if all SMs of the device had as much to do.
    """

    hbm: Share
    l2: Share
    ingest: Share
    tensor: Share
    even: tuple[Share, Share]


@dataclass(frozen=True)
class Load:
    """What a phase is loaded by.

    Attributes
    ----------
    cluster : Count
        CTAs of a cluster.
    active : Count
        Clusters that run at the same time.
    fresh : Share
        Bytes that are not in L2 yet.
    ahead : Share
        Bytes that each CTA has loaded before the phase begins.
    """

    cluster: Count
    active: Count
    fresh: Share
    ahead: Share = 0.0


def streams(phase: Phase, load: Load, item: int, rates: Rates, sms: int) -> Streams:
    """Time the streams of a phase.

    Parameters
    ----------
    phase : Phase
        The phase.
    load : Load
        Who loads it.
    item : int
        Bytes of an element.
    rates : Rates
        Of the device.
    sms : int
        Of the device.
    """
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

    As much by multicast as alone (`Measured.multicast_ingest`): what all SMs take in together is
    bound by L2, which is another stream.
    """
    return rates.fitted.ingest * rates.measured.sm_ingest


def overlapped(*times: Share) -> Share:
    """How long several streams take together: a soft maximum."""
    total = sum(np.maximum(each, 0.0) ** OVERLAP for each in times)
    return np.power(total, 1 / OVERLAP)
