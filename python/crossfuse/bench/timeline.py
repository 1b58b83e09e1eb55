"""Measures when CTAs of our kernels reach each event, in a row of launches with cold weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crossfuse.bench.job import pack_apart
from crossfuse.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from crossfuse.lower.extract import Lowered
    from crossfuse.runtime import LoadedKernel

#: Launches in a graph; the last is looked at.
LAUNCHES = 8


@dataclass(frozen=True)
class Event:
    """When CTAs reached an event, in microseconds since the first one of them began."""

    #: See `crossfuse.lower.hopper.features.feature.events`.
    name: str
    #: Over the CTAs that reached it, as are the next two.
    first: float
    median: float
    last: float
    #: How many reached it: those without a tile of a phase skip its events.
    ctas: int


@dataclass(frozen=True)
class KernelTimeline:
    """Events of the last of several launches of a kernel."""

    #: Its symbol.
    kernel: str
    #: Microseconds from the end of the kernel before to the first CTA's beginning; negative where
    #: they overlap. None for the first of a row.
    gap: float | None
    #: In the order of the kernel.
    events: tuple[Event, ...]


def summarise(
    symbols: Sequence[str], names: Sequence[Sequence[str]], stamps: Sequence[np.ndarray]
) -> tuple[KernelTimeline, ...]:
    """Reduce the time stamps of all CTAs to the events of each kernel, in the order of launches.

    Stamps are nanoseconds of shape (CTAs, events), 0 for what did not happen. There may be more of
    them than kernels: further rounds of the same launches, of which the last is reduced.
    """
    count = len(symbols)
    found = []
    for number in range(len(stamps) - count, len(stamps)):
        here = stamps[number]
        begin = here[here > 0].min()
        gap = None if number == 0 else float(begin - stamps[number - 1].max()) / 1e3
        events = []
        for name, column in zip(names[number % count], here.T, strict=True):
            times = (column[column > 0] - begin) / 1e3
            if times.size:
                middle = float(np.median(times))
                events.append(
                    Event(name, float(times.min()), middle, float(times.max()), int(times.size))
                )
        found.append(KernelTimeline(symbols[number % count], gap, tuple(events)))
    return tuple(found)


def measure_timeline(
    spec: WorkloadSpec, target: str | None = None, placement: str = "auto"
) -> tuple[KernelTimeline, ...]:
    """Compile a workload with a timeline and run it; for its options see `crossfuse.compile`.

    It is refused without torch and a Hopper GPU, and where there is no kernel of the Hopper
    pipeline.
    """
    from crossfuse.bench.environment import require_gpu
    from crossfuse.compiler import compile as compile_source
    from crossfuse.files import scratch_folder
    from crossfuse.hardware import device
    from crossfuse.lower.extract import lower
    from crossfuse.runtime import build_library, load

    require_gpu()
    compiled = compile_source(spec, target=target, rule="tensor", placement=placement)
    timed = lower(compiled.schedule, target, timeline=True)
    library = build_library(timed.image, scratch_folder(), device=device(target))
    symbols = [each.symbol for each in timed.image.launches]
    return summarise(symbols, timed.events, _stamps(spec, load(library.shared_object), timed))


def _stamps(spec: WorkloadSpec, kernel: LoadedKernel, timed: Lowered) -> list[np.ndarray]:
    """Time stamps of all kernels of all launches of a graph."""
    import torch

    from crossfuse.bench.job import weight_bytes
    from crossfuse.measure.timing import copies_needed
    from crossfuse.runtime.tensors import to_torch
    from crossfuse.workload.numerics import random_inputs

    tensors = {name: to_torch(each).to("cuda") for name, each in random_inputs(spec).items()}
    a = tensors.pop(next(iter(tensors)))
    copies = copies_needed(weight_bytes(spec), LAUNCHES, "cold")
    sets = [pack_apart(tensors) for _ in range(min(copies, LAUNCHES))]
    output = torch.empty(spec.output, dtype=getattr(torch, spec.out), device="cuda")
    shapes = [each.shape for each in timed.image.buffers[-len(timed.events) :]]
    rows = [
        [torch.zeros(each, dtype=torch.int64, device="cuda") for each in shapes]
        for _ in range(LAUNCHES)
    ]
    kernel(a, *sets[0], output, *rows[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number, row in enumerate(rows):
            kernel(a, *sets[number % len(sets)], output, *row)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return [each.cpu().numpy() for row in rows for each in row]
