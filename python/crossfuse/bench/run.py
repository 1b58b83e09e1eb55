"""Measuring of jobs one after another, each in a worker, while the next ones prepare."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from crossfuse.bench.job import Counters, Planned, Row
from crossfuse.bench.ours import compile_kernel, kernels
from crossfuse.measure.job import Job, Request, Timing
from crossfuse.measure.timer import WORKER, Measurer
from crossfuse.models.spec import names_one
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve_any
from crossfuse.workload.spec import WorkloadSpec

#: Workers that import, compile and work out references while another one measures.
_PREPARING = 2


def run(
    planned: Sequence[Planned],
    timeout: float,
    *,
    report: Callable[[Row], None] = lambda row: None,
    command: Sequence[str] = WORKER,
    count: Callable[[Job, float], Counters] | None = None,
) -> tuple[Row, ...]:
    """Measure everything, in order; a job that breaks becomes a row that says so.

    `timeout` is in seconds for each job, from when it may measure. `report` gets every row as soon
    as it is there. `count` reads the memory traffic of a job that has a time, such as
    `crossfuse.bench.counters.count`. `command` replaces `WORKER`.
    """
    rows = []
    counted: dict[Job, Counters] = {}
    with tempfile.TemporaryDirectory(prefix="crossfuse-bench-") as folder:
        # The folder keeps float64 references between the variants of a workload.
        jobs = [each.job for each in planned]
        for each, timing in zip(planned, measured(jobs, timeout, command, folder), strict=True):
            row = Row(each, timing)
            if count is not None and row.timing.microseconds is not None:
                # The protocol changes how kernels are launched, and not what they read.
                once = replace(each.job, protocol="stream", repeats=1, calls=1)
                counted[once] = counted.get(once) or count(once, timeout)
                row = replace(row, counters=counted[once])
            rows.append(row)
            report(row)
    return tuple(rows)


def measured(
    jobs: Sequence[Job], timeout: float, command: Sequence[str] = WORKER, folder: str = ""
) -> Iterator[Timing]:
    """Yield the timings of jobs, one after another, each measured in a process of its own.

    The next ones prepare in the meantime, without the GPU. With protocols that time launches none
    does: it would compete for the CPU cores. `timeout` is in seconds for each job, from when it may
    measure: for the rest of the preparation, and as many for the measurement.
    """
    quiet = any(each.protocol == "stream" for each in jobs)
    measurers: deque[tuple[Measurer, Request]] = deque()
    waiting = iter(jobs)
    try:
        for _ in jobs:
            wanted = 1 if quiet else 1 + _PREPARING
            while len(measurers) < wanted and (job := next(waiting, None)) is not None:
                measurers.append((Measurer(command, timeout), Request(job, folder=folder)))
                measurers[-1][0].prepare(measurers[-1][1])
            measurer, request = measurers[0]
            timing, _attempts = measurer.measure(request, timeout)
            measurer.close()
            measurers.popleft()
            yield timing
    finally:
        for measurer, _request in measurers:
            measurer.close()


_Kernel = tuple[WorkloadSpec | CascadeSpec, str | None]


def build_ahead(planned: Sequence[Planned], workers: int, target: str, timeout: float) -> int:
    """Fill the kernel cache in parallel, so that timed jobs find their cubins; returns how many.

    Jobs run one after another, since they are timed, and nvcc takes most of the time of one of
    ours. A kernel that does not compile, or is not done after `timeout` seconds, is left to its
    job, which says why; so are all that a killed process leaves. No workers: nothing is compiled.
    """
    wanted = distinct(each.job for each in planned if not names_one(each.job.spec))
    return in_processes(_build, [(*each, target) for each in wanted], workers, timeout)


def in_processes(
    work: Callable[..., bool], arguments: Sequence[tuple[Any, ...]], workers: int, timeout: float
) -> int:
    """Call a function several times in parallel, and count how often it says that it was done.

    What a killed process leaves, or is not begun after `timeout` seconds, does not count. A single
    call is left out, and all are without workers.
    """
    if not workers or len(arguments) < 2:
        return 0
    # A process of its own for each: a fork would share this one's threads and its GPU.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(work, *each) for each in arguments]
        done, _ = wait(futures, timeout)
        pool.shutdown(wait=True, cancel_futures=True)
    return sum(each.result() for each in done if each.exception() is None)


def distinct(jobs: Iterable[Job]) -> tuple[_Kernel, ...]:
    """The kernels of all jobs without repetitions, each with the placement of its intermediate."""
    return tuple(
        dict.fromkeys(
            kernel for job in jobs for kernel in kernels(job.variant, resolve_any(job.spec))
        )
    )


def _build(spec: WorkloadSpec | CascadeSpec, placement: str | None, target: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="crossfuse-ahead-") as folder:
        try:
            compile_kernel(spec, placement, target, folder)
        except Exception:  # its job reports it
            return False
    return True
