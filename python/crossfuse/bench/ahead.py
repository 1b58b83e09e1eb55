"""Compiles the kernels of many jobs at once, before any of them is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context

from crossfuse.bench.job import Job, Planned
from crossfuse.bench.ours import compile_kernel, kernels
from crossfuse.models.spec import names_one
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve_any
from crossfuse.workload.spec import WorkloadSpec

_Kernel = tuple[WorkloadSpec | CascadeSpec, str | None]


def build_ahead(planned: Sequence[Planned], workers: int, target: str, timeout: float) -> int:
    """Fill the kernel cache in parallel, so that timed jobs find their cubins; returns how many.

    Jobs run one after another, since they are timed, and nvcc takes most of the time of one of
    ours. A kernel that does not compile, or is not done after `timeout` seconds, is left to its
    job, which says why; so are all that a killed process leaves. No workers: nothing is compiled.
    """
    wanted = distinct(each.job for each in planned if not names_one(each.job.spec))
    if not workers or len(wanted) < 2:
        return 0
    # A process of its own for each: a fork would share this one's threads and its GPU.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(_build, *each, target) for each in wanted]
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
