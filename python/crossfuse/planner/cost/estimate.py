"""Microseconds of kernels, family by family, as a sum of named terms.

A kernel is a row of phases. What happens at once in a phase is a soft maximum of streams; what
follows one another is a sum::

    time = start + loop 1 + epilogue 1 + passing + loop 2 + epilogue 2 + adding + store

    passing    l2: imbalance and flag        global: imbalance and relaunch
               dsm: gather                   registers: nothing
    adding     exchange (sums through DSM), sums (parts through L2), or nothing

While the intermediate passes, weights of the second phase are loaded, as many as the ring holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.loop import (
    Load,
    Streams,
    ingest_speed,
    overlapped,
    room_for,
    streams,
    turns_of,
)
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.dataflow.counts import Count, Share, choose, least, where
from crossfuse.planner.kernels.clustered import ClusteredKernel
from crossfuse.planner.kernels.every import Kernel, memories
from crossfuse.planner.kernels.memory import Memory
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.tiled import TiledKernel

#: Names of terms, in the order in which they are told.
TERMS = (
    "start",
    "hbm",
    "l2",
    "ingest",
    "tensor",
    "waves",
    "epilogue",
    "imbalance",
    "flag",
    "relaunch",
    "gather",
    "exchange",
    "barrier",
    "sums",
    "spills",
    "store",
    "kernels",
)


@dataclass(frozen=True)
class Estimate:
    """Time of one candidate, or of many.

    Attributes
    ----------
    terms : Mapping[str, Share]
        Microseconds by name, of those in `TERMS` that there are. What a stream of a loop takes
        beyond those told before it counts as its own.
    busy : Mapping[str, Share]
        Microseconds that each stream would take alone.
    """

    terms: Mapping[str, Share]
    busy: Mapping[str, Share] = field(default_factory=dict)

    @property
    def microseconds(self) -> Share:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def bound(self) -> str:
        """The longest stream of one candidate; ``"latency"`` if all take less than half."""
        name = max(self.busy, key=lambda each: float(self.busy[each]))
        return name if float(self.busy[name]) > float(self.microseconds) / 2 else "latency"


class _Clock:
    """Adds terms up."""

    def __init__(self) -> None:
        self.terms: dict[str, Any] = {}
        self.busy: dict[str, Any] = {}

    def add(self, name: str, time: Share) -> None:
        self.terms[name] = self.terms.get(name, 0.0) + time

    def loop(self, found: Streams, between: Share) -> Share:
        """Add a phase's loop; `between` of its tiles their epilogues are in the way of wgmma.

        Each stream is told by what it adds to those before it, so that all of them are the whole.
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


@dataclass(frozen=True)
class _Work:
    """One estimate's constants."""

    kernel: Kernel
    shape: Shape
    device: Device
    rates: Rates
    room: Memory

    @property
    def active(self) -> Count:
        """Clusters that run at the same time."""
        room = room_for(self.kernel.cluster, self.device, self.rates)
        return least(_largest(self.kernel.clusters(self.shape, self.device)), room)

    def load(self, fresh: Share, ahead: Share = 0.0) -> Load:
        return Load(self.kernel.cluster, self.active, fresh, ahead)

    def run(self, clock: _Clock, phase: Phase, load: Load) -> Share:
        """Add a phase's loop, and the epilogue of its last tiles."""
        epilogue = self.epilogue(phase)
        turns = turns_of(phase, load.active)
        found = streams(phase, load, self.shape.item, self.rates, self.device.sms)
        whole = clock.loop(found, (turns - 1) * epilogue)
        clock.add("epilogue", epilogue)
        return whole + epilogue

    def epilogue(self, phase: Phase) -> Share:
        """Of one tile. A CTA that sums a slice of it makes that alone."""
        fitted = self.rates.fitted
        column = fitted.gated if phase.products > 1 else fitted.column
        return column * phase.columns * phase.rows / 64 / phase.split

    def ahead(self, phase: Phase, gap: Share) -> Share:
        """Bytes of the next phase's weights that a CTA loads in a gap."""
        ctas = self.active * self.kernel.cluster
        share = self.rates.fitted.hbm * self.rates.measured.hbm_read / ctas
        speed = np.minimum(ingest_speed(self.rates), share)
        most = np.minimum(self.room.right, phase.steps) * phase.right
        return np.minimum(most, gap * speed)

    def exchange(self, clock: _Clock, phase: Phase) -> None:
        """Partial sums through DSM, where a reduction is split over a cluster."""
        split = phase.split
        sent = phase.received * (split - 1) / split
        sent = sent / (self.rates.fitted.push * at(self.rates.measured.dsm_push, split))
        barrier = at(self.rates.measured.cluster_barrier, split)
        peers = self.rates.fitted.exchange * split
        clock.add("exchange", where(split > 1, peers + sent, 0.0))
        clock.add("barrier", where(split > 1, barrier, 0.0))

    def sums(self, clock: _Clock, phase: Phase, parts: Count) -> None:
        """Partial sums through L2, of several parts."""
        fitted, rates = self.rates.fitted, self.rates.measured
        rows = least(phase.rows, self.shape.m)
        moved = phase.tiles * self.kernel.cluster * rows * phase.columns * 4.0
        time = fitted.sums + fitted.part * parts + moved / rates.l2_write + moved / rates.l2_read
        time = time + fitted.summed * rows * phase.columns * 4.0 / rates.sm_ingest
        clock.add("sums", where(parts > 1, time, 0.0))


def estimate(
    kernel: Kernel, shape: Shape, device: Device, rates: Rates, room: Memory | None = None
) -> Estimate:
    """Estimate the time of kernels from the end of the kernel before to their own end.

    Parameters
    ----------
    kernel : Kernel
        Tiles of one candidate, or of many; legal ones.
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    rates : Rates
        What it was measured to do.
    room : Memory | None
        Shared memory of its last kernel, if it is known already.

    Returns
    -------
    Estimate
        Named terms, each a number or an array. Weights are taken to come from memory, and the
        input to be in L2.
    """
    room = room or memories(kernel, shape, device)[-1]
    work, clock = _Work(kernel, shape, device, rates, room), _Clock()
    fitted, measured = rates.fitted, rates.measured
    latency = measured.early_launch + measured.hbm + at(measured.cluster_barrier, kernel.cluster)
    ctas = work.active * kernel.cluster
    start = fitted.start + latency + fitted.crowd * np.log2(ctas)
    clock.add("start", start)
    if not isinstance(kernel, TiledKernel):
        # Clusters that find no room at first begin anew.
        turns = turns_of(kernel.phases(shape)[0], work.active)
        clock.add("waves", (turns - 1) * (start + fitted.store))
    if isinstance(kernel, TiledKernel):
        _tiled(work, clock, kernel)
    elif isinstance(kernel, ClusteredKernel):
        _clustered(work, clock, kernel)
    else:
        _registers(work, clock, kernel)
    clock.add("store", fitted.store)
    return Estimate(clock.terms, clock.busy)


def _tiled(work: _Work, clock: _Clock, kernel: TiledKernel) -> None:
    shape, fitted = work.shape, work.rates.fitted
    first, *others = kernel.phases(shape)
    weights = shape.weight_bytes
    whole = work.run(clock, first, work.load(weights[0]))
    work.exchange(clock, first)
    for second in others:
        late = fitted.imbalance * whole
        clock.add("imbalance", late)
        staged = kernel.place == "l2"
        passing: Share = fitted.flag + work.rates.measured.flag if staged else fitted.relaunch
        # Tiles of the intermediate come behind the weights that were asked for before them.
        queue = np.minimum(work.room.right, second.steps) * second.right
        passing = passing + fitted.queue * queue / ingest_speed(work.rates)
        clock.add("flag" if staged else "relaunch", passing)
        gap = late + passing + work.epilogue(first)
        ahead = work.ahead(second, gap)
        work.run(clock, second, work.load(weights[1], ahead))
        work.exchange(clock, second)


def _clustered(work: _Work, clock: _Clock, kernel: ClusteredKernel) -> None:
    shape, fitted, size = work.shape, work.rates.fitted, kernel.size
    first, second = kernel.phases(shape)
    weights = shape.weight_bytes
    work.run(clock, first, work.load(weights[0]))
    turns = turns_of(first, work.active)
    slices = (size - 1) * first.rows * first.columns * shape.item
    sent = slices / at(work.rates.measured.dsm_push, size)
    gather = where(size > 1, turns * (fitted.gather + sent), 0.0)
    clock.add("gather", gather)
    ahead = work.ahead(second, gather + work.epilogue(first))
    work.run(clock, second, work.load(weights[1], ahead))
    work.sums(clock, second, kernel.parts)
    # Sums of both products in the registers of one warpgroup's threads, of tiles this wide.
    wide = np.clip((first.columns * first.products - 192) / 64, 0, 1)
    spilt = wide * np.clip((second.columns - 128) / 128, 0, 1) * (first.rows == 64)
    clock.add("spills", work.rates.fitted.spill * spilt * second.steps * second.depth * turns)


def _registers(work: _Work, clock: _Clock, kernel: RegisterKernel) -> None:
    shape = work.shape
    first, second = kernel.phases(shape)
    weights = shape.weight_bytes
    work.run(clock, first, work.load(weights[0]))
    ahead = work.ahead(second, work.epilogue(first))
    work.run(clock, second, work.load(weights[1], ahead))
    work.exchange(clock, second)
    work.sums(clock, second, choose(kernel.size > 1, 1, kernel.parts))


def eager(shape: Shape, rates: Rates, sms: int = 132) -> Estimate:
    """Estimate cuBLAS: a kernel for each product and for each activation, in a CUDA graph.

    Gate and up are one product of both weights, an activation and a multiplication.
    """
    fitted = rates.fitted
    clock = _Clock()
    weights = shape.weight_bytes
    flops = (2.0 * shape.m * shape.n * shape.k * shape.products, 2.0 * shape.m * shape.n * shape.l)
    peak = fitted.eager_tensor * rates.tensor_rate(128, 256, shape.item) * sms
    for size, work in zip(weights, flops, strict=True):
        hbm = size / (fitted.eager * rates.measured.hbm_read)
        tensor = work / peak
        clock.loop(Streams(hbm, 0.0, 0.0, tensor, (0.0, tensor)), 0.0)
    # A product, an activation (of gate and up: two), and a product.
    count = np.where(np.asarray(shape.l) > 0, 2 + shape.products, 1)
    clock.add("kernels", count * fitted.eager_kernel)
    return Estimate(clock.terms, clock.busy)


def _largest(clusters: tuple[Count, ...]) -> Count:
    found = clusters[0]
    for each in clusters[1:]:
        found = np.maximum(found, each)
    return found
