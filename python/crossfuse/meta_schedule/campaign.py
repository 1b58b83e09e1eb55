"""Builds many candidates in several processes and measures them in one, by workload."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from crossfuse.meta_schedule.build import shared_object
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.conditions import Conditions
from crossfuse.meta_schedule.measurer import Measurer
from crossfuse.meta_schedule.preparing import (
    Group,
    grouped,
    preparing,
    references,
)
from crossfuse.meta_schedule.records import Record

_LOOK = 0.5


def measure_all(
    candidates: Sequence[Candidate],
    folder: Path,
    how: Conditions,
    report: Callable[[Record], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Build and measure candidates; each record is reported as soon as it is there.

    Workloads are measured one after another, each as soon as all of its candidates are built and
    its reference is there. The next one's inputs are drawn meanwhile, by a second process. `stop`
    is asked before each measurement whether to leave the rest; what is being built is dropped then.
    Libraries lie in, or go to, `folder` (`crossfuse.meta_schedule.build.shared_object`), as do
    references.
    """
    groups = grouped(candidates)
    turns = _Turns(folder, how, report, stop)
    with preparing(groups, folder, how) as ready:
        try:
            turns.run(ready, len(groups))
        finally:
            turns.close()


class _Turns:
    """Two processes in alternation: one measures a workload, the other prepares the next."""

    def __init__(
        self,
        folder: Path,
        how: Conditions,
        report: Callable[[Record], None],
        stop: Callable[[], bool],
    ) -> None:
        self._folder, self._how, self._report, self._stop = folder, how, report, stop
        self._all = [Measurer(references(folder), how) for _ in range(2)]

    def run(self, ready: queue.SimpleQueue[Group], count: int) -> None:
        """Measure `count` workloads as they become ready."""
        idle = deque(self._all)
        for each in idle:
            each.start()
        pending: deque[tuple[Group, Measurer]] = deque()
        for _ in range(count):
            while idle and (group := self._next(ready, wait=not pending)):
                measurer = idle.popleft()
                measurer.prepare(group.spec)
                pending.append((group, measurer))
            if not pending:
                return
            group, measurer = pending.popleft()
            for candidate in group.candidates:
                if self._stop():
                    return
                self._report(self._record(candidate, group, measurer))
            idle.append(measurer)

    def close(self) -> None:
        """Kill both processes."""
        for each in self._all:
            each.close()

    def _next(self, ready: queue.SimpleQueue[Group], *, wait: bool) -> Group | None:
        """The next workload; None when stopped, or, without `wait`, where there is none yet."""
        while True:
            try:
                return ready.get(timeout=_LOOK if wait else 0.0)
            except queue.Empty:
                if not wait or self._stop():
                    return None

    def _record(self, candidate: Candidate, group: Group, measurer: Measurer) -> Record:
        build = group.builds[candidate.id]
        job, gpu = self._how.job_of(candidate), self._how.gpu
        if build.status != "ok":
            return Record(candidate, build, job, None, 0, gpu)
        path = shared_object(self._folder, candidate)
        timing, attempts = measurer.measure(job, path, candidate.family)
        return Record(candidate, build, job, timing, attempts, gpu)
