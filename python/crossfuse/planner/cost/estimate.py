"""Microseconds of kernels, family by family, as a sum of named terms.

A kernel is a row of phases. What happens at once in a phase is a soft maximum of streams; what
follows one another is a sum::

    time = start + loop 1 + epilogue 1 + passing + loop 2 + epilogue 2 + adding + further + store

    passing    l2, phases: imbalance and flag        global, launches: imbalance and relaunch
               dsm: gather                   registers: nothing
    adding     exchange (sums through DSM), sums (parts through L2), or nothing
    further    hbm: scales, biases and the residual, once, by whoever stores

While the intermediate passes, weights of the second phase are loaded, as many as the ring holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from crossfuse.hardware import WARP, Device
from crossfuse.planner.cost.rates import Rates, at, rates_of
from crossfuse.planner.cost.terms import LEARNED, Estimate, features
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import Memory, resident
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import (
    Count,
    Flag,
    Shape,
    Share,
    ceil_div,
    choose,
    count,
    flags,
    least,
    most,
    select,
)

#: How much longer cuBLAS takes for rows that are no multiple of 16 bytes, and with which power of
#: their number: 1.5 times of 1, 4 of 50, 7 of 800. Of 63 chains on H100s and H200s half are told to
#: within 17 %.
UNALIGNED, UNALIGNED_ROWS = 1.55, 0.24


# The main loop of a phase: streams that overlap, and what each adds to those before it.

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

# Kernels: phases one behind another, and what passes between them.


def active_clusters(kernel: TileKernel, shape: Shape, device: Device) -> Count:
    """Clusters that run at the same time, of the launch that has most."""
    return least(reduce(most, kernel.clusters(shape, device)), resident(device, kernel.cluster))


@dataclass(frozen=True)
class Work:
    """Constants of one estimate, and the parts that all families share; times are microseconds."""

    kernel: TileKernel
    shape: Shape
    device: Device
    rates: Rates
    room: Memory

    @cached_property
    def active(self) -> Count:
        """Clusters that run at the same time."""
        return active_clusters(self.kernel, self.shape, self.device)

    def load(self, fresh: Share, ahead: Share = 0.0) -> Load:
        """Describe who runs a phase: `fresh` bytes come from memory, `ahead` are there already."""
        return Load(self.kernel.cluster, self.active, fresh, ahead)

    def run(self, clock: Clock, phase: Phase, load: Load) -> Share:
        """Add a phase's loop, and the epilogue of its last tiles; both together are returned."""
        epilogue = self.epilogue(phase)
        turns = turns_of(phase, load.active)
        found = streams(phase, load, self.shape.item, self.rates, self.device.sms)
        whole = clock.loop(found, (turns - 1) * epilogue)
        clock.add("epilogue", epilogue)
        return whole + epilogue

    def epilogue(self, phase: Phase) -> Share:
        """Time of one tile's epilogue; a CTA that sums a slice of a tile makes that alone."""
        fitted = self.rates.fitted
        column = fitted.gated if phase.products > 1 else fitted.column
        # Of a column, 64 elements, each of the four schedulers has half a warp.
        functions = phase.functions * 64 / (4 * WARP) / self.device.clock_mhz
        return (column + functions) * phase.columns * phase.rows / 64 / phase.split

    def ahead(self, phase: Phase, gap: Share) -> Share:
        """Bytes of the next phase's weights that a CTA loads in a gap."""
        return np.minimum(self.filled(phase), gap * self.arrival)

    def filled(self, phase: Phase) -> Share:
        """Bytes of a phase's weights that the ring of a CTA holds."""
        return np.minimum(self.room.right, phase.steps) * phase.right

    @cached_property
    def arrival(self) -> Share:
        """Bytes a microsecond of memory that come to a CTA."""
        ctas = self.active * self.kernel.cluster
        return np.minimum(ingest_speed(self.rates), memory_speed(self.rates) / ctas)

    def exchange(self, clock: Clock, phase: Phase) -> None:
        """Add partial sums through DSM, where a reduction is split over a cluster."""
        split = phase.split
        sent = phase.received * (split - 1) / split
        sent = sent / (self.rates.fitted.push * at(self.rates.measured.dsm_push, split))
        barrier = at(self.rates.measured.cluster_barrier, split)
        peers = self.rates.fitted.exchange * split
        turns = turns_of(phase, self.active)
        clock.add("exchange", choose(split > 1, turns * (peers + sent), 0.0))
        clock.add("barrier", choose(split > 1, turns * barrier, 0.0))

    def again(self, clock: Clock, phase: Phase) -> None:
        """Add later waves of clusters that split a reduction, which make one tile each."""
        turns = turns_of(phase, self.active)
        clock.add(
            "waves",
            choose(phase.split > 1, (turns - 1) * (self.start + self.rates.fitted.store), 0.0),
        )

    def begin_anew(self, clock: Clock, phase: Phase) -> None:
        """Add later waves of clusters that find no room at first."""
        turns = turns_of(phase, self.active)
        clock.add("waves", (turns - 1) * (self.start + self.rates.fitted.store))

    @cached_property
    def start(self) -> Share:
        """Time from the launch to the first tiles."""
        ctas = self.active * self.kernel.cluster
        return self.rates.start_time(self.kernel.cluster, ctas, self.kernel.own_start)

    def spills(
        self, clock: Clock, first: Phase, second: Phase, between: tuple[float, float]
    ) -> None:
        """Add spills, where one warpgroup has too few registers for the sums of both products.

        ``between`` are the sums of a thread from which on some spill, and where most do.
        """
        fewest, full = between
        most = np.clip((first.sums + second.sums - fewest) / (full - fewest), 0, 1)
        spilt = most * (first.rows == 64) * turns_of(second, self.active)
        clock.add("spills", self.rates.fitted.spill * spilt * second.steps * second.depth)

    def sums(self, clock: Clock, phase: Phase, parts: Count) -> None:
        """Add partial sums through L2, where there are several parts."""
        fitted, rates = self.rates.fitted, self.rates.measured
        rows = least(phase.rows, self.shape.m)
        moved = phase.tiles * self.kernel.cluster * rows * phase.columns * 4.0
        time = fitted.sums + fitted.part * parts + moved / rates.l2_write + moved / rates.l2_read
        time = time + fitted.summed * rows * phase.columns * 4.0 / rates.sm_ingest
        clock.add("sums", choose(parts > 1, time, 0.0))


def estimate(
    kernel: TileKernel, shape: Shape, device: Device, rates: Rates, room: Memory | None = None
) -> Estimate:
    """Estimate the time of kernels, from the end of the kernel before to their own end.

    Tiles are legal ones, of one candidate or as arrays of many; terms are numbers or arrays alike.
    Weights and what epilogues read are taken to come from memory, and the input to be in L2.
    `room`, the shared memory of the last kernel, is computed where it is None.
    """
    room = room or kernel.memories(shape, device)[-1]
    work, clock = Work(kernel, shape, device, rates, room), Clock()
    fitted, start = rates.fitted, work.start
    clock.add("start", start)
    kernel.spend(work, clock)
    clock.stream("hbm", shape.further / memory_speed(rates))
    clock.add("store", fitted.store)
    return Estimate(clock.terms, clock.busy)


def eager(shape: Shape, rates: Rates, sms: int = 132) -> Estimate:
    """Estimate cuBLAS: a kernel for each product and for each activation, in a CUDA graph.

    Gate and up are one product of both weights, an activation and a multiplication.
    """
    fitted = rates.fitted
    clock = Clock()
    memory = fitted.eager * rates.measured.hbm_read
    peak = fitted.eager_tensor * rates.tensor_rate(128, 256, shape.item) * sms
    for size, layer in zip(shape.weight_bytes, shape.layers, strict=True):
        work = 2.0 * shape.m * layer.columns * layer.depth * layer.products
        whole = (layer.depth * shape.item % 16 == 0) & (layer.columns * shape.item % 16 == 0)
        slower = choose(whole, 1.0, UNALIGNED * shape.m**UNALIGNED_ROWS)
        memory_time, tensor = slower * size / memory, slower * work / peak
        clock.loop(Streams(memory_time, 0.0, 0.0, tensor, (0.0, tensor)), 0.0)
    clock.stream("hbm", shape.further / memory)
    clock.add("kernels", shape.separate * fitted.eager_kernel)
    return Estimate(clock.terms, clock.busy)


def alone(kernel: TileKernel, shape: Shape, device: Device, rates: Rates) -> dict[str, Share]:
    """Microseconds that each stream of the loops would take if there were no other.

    Unlike `Estimate.busy`, with what is loaded while the intermediate passes.
    """
    active = active_clusters(kernel, shape, device)
    found: dict[str, Share] = dict.fromkeys(("hbm", "l2", "ingest", "tensor"), 0.0)
    for phase, fresh in zip(kernel.phases(shape), shape.weight_bytes, strict=False):
        load = Load(kernel.cluster, active, fresh)
        own = kernel.own_streams(phase, load, shape, rates, device)
        each = own or streams(phase, load, shape.item, rates, device.sms)
        for name in found:
            found[name] = found[name] + getattr(each, name)
    found["hbm"] = found["hbm"] + shape.further / memory_speed(rates)
    return found


# The estimate corrected by trees that were learned from measured kernels.
#
# ``time = estimate * exp(correction)``. What the correction adds or takes is a term of its own, so
# that a plan still says which part of its time is explained and which is experience.


def corrected(kernel: TileKernel, shape: Shape, device: Device, rates: Rates) -> Estimate:
    """Estimate the time of kernels like `estimate`, and correct it by trees if the rates have any.

    The term ``"learned"`` is negative where kernels were faster than estimated. The user's own
    terms come after the correction, which was not learned from them.
    """
    room = kernel.memories(shape, device)[-1]
    found = estimate(kernel, shape, device, rates, room)
    if rates.trees is None or len(shape.layers) > 2 or not kernel.staged_tiles:
        return rates.with_own(found, kernel, shape, device)
    rows = features(kernel, shape, device, found, room)
    by: np.ndarray | float = np.expm1(rates.trees.sum(rows)) * np.asarray(found.microseconds)
    if not np.ndim(found.microseconds):
        by = float(np.asarray(by).item())
    found = replace(found, terms={**found.terms, LEARNED: by})
    return rates.with_own(found, kernel, shape, device)


# The fastest of many kernels by the corrected estimate, some of whose tiles may be given.

#: Tiles of a family, the best by the estimate, that are corrected by trees.
_NEAR = 4000


def fastest(
    kernels: TileKernel, shape: Shape, device: Device, rates: Rates, keep: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Find at most `keep` kernels with the least corrected time: their indices, and microseconds.

    The kernels are legal tiles of one family as arrays, at least one; the fastest comes first.
    """
    # What trees say costs more than the estimate: only those near the best are worth it.
    found = rates.with_own(estimate(kernels, shape, device, rates), kernels, shape, device)
    times = np.asarray(found.microseconds)
    near = np.argsort(times, kind="stable")[: max(_NEAR, keep)]
    times = np.asarray(corrected(select(kernels, near), shape, device, rates).microseconds)
    order = np.argsort(times, kind="stable")[:keep]
    return near[order], times[order]


def fill_tiles(
    found: TileKernel, shape: Shape, device: Device, allowed: Callable[[Any], Flag]
) -> TileKernel | None:
    """Choose the tiles that a caller did not give, of those with what was given.

    `allowed` flags those of many kernels that the rule would take, beyond those that are legal. The
    result is of plain numbers; None if no tiles are legal.
    """
    found = select(found, flags(found, found.legal(shape, device)))
    if count(found):
        found = select(found, flags(found, allowed(found)))
    if not count(found):
        return None
    # Where nothing has room for two stages, the lowering says of which buffers there is too much.
    room = flags(found, found.fits(shape, device))
    found = select(found, room) if room.any() else found
    if count(found) == 1:
        return select(found, 0)
    (best,), _ = fastest(found, shape, device, rates_of(device))
    return select(found, int(best))


def best_of(kernels: TileKernel, shape: Shape, device: Device, rates: Rates) -> Estimate:
    """Correct the estimates of all kernels of arrays, at least one, and take the shortest."""
    times = np.asarray(corrected(kernels, shape, device, rates).microseconds)
    best = int(np.argmin(np.broadcast_to(times, (count(kernels),))))
    return corrected(select(kernels, best), shape, device, rates)
