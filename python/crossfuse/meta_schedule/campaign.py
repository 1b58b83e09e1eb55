"""Many candidates built by some processes and measured by one, workload after workload."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from crossfuse.bench.job import Timing
from crossfuse.meta_schedule.build import library
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.conditions import Conditions
from crossfuse.meta_schedule.peer import NoAnswer, Peer
from crossfuse.meta_schedule.preparing import (
    REFERENCE_SECONDS,
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
    """Build and measure candidates.

    Workloads are measured one after another, each as soon as all of its candidates are built and
    its reference is there. The next one's inputs are drawn meanwhile, by a second process.

    Parameters
    ----------
    candidates : Sequence[Candidate]
        What to measure.
    folder : pathlib.Path
        Where libraries lie or go (`crossfuse.meta_schedule.build.library`), and references.
    how : Conditions
        How.
    report : Callable
        Called with each record as soon as it is there.
    stop : Callable
        Asked before each measurement whether to leave the rest; what is being built is dropped.
    """
    groups = grouped(candidates)
    turns = _Turns(folder, how, report, stop)
    with preparing(groups, folder, how) as ready:
        try:
            turns.run(ready, len(groups))
        finally:
            turns.close()


class Measurer:
    """A process that measures the candidates of one workload after another.

    A candidate that hangs, dies, fails or computes something wrong costs its process, so that it
    cannot harm the next one. If others were measured there before, it may have been one of those
    that did harm, so it is measured once more in a process of its own.

    Parameters
    ----------
    folder : pathlib.Path
        See `measure_all`.
    how : Conditions
        How.
    """

    def __init__(self, folder: Path, how: Conditions) -> None:
        self._folder, self._how = folder, how
        self._peer = Peer("measure", how.measurer)
        self._spec = ""
        self._used = 0
        #: Preparations of which the answer is still to come.
        self._preparing = 0

    def start(self) -> None:
        """Start the process ahead of its first request."""
        with suppress(NoAnswer):
            self._peer.start()

    def prepare(self, spec: str) -> None:
        """Let the process draw inputs and load the reference of a workload; does not wait.

        Parameters
        ----------
        spec : str
            The workload of the measurements to come.
        """
        self._spec, self._used = spec, 0
        request = {"do": "prepare", "spec": spec, "folder": str(references(self._folder))}
        # That it does not start, the measurement will find too.
        with suppress(NoAnswer):
            self._peer.send(request)
            self._preparing += 1

    def measure(self, candidate: Candidate) -> tuple[Timing, int]:
        """Measure a candidate of the workload that was prepared.

        Parameters
        ----------
        candidate : Candidate
            Whose library is built.

        Returns
        -------
        Timing
            What was measured, or what went wrong.
        int
            How many times it was tried.
        """
        attempts = 0
        while True:
            alone = self._used == 0
            start = time.perf_counter()
            timing = self._attempt(candidate)
            timing = replace(timing, seconds=round(time.perf_counter() - start, 3))
            attempts += 1
            self._used += 1
            if not timing.fault or (candidate.family == "eager" and timing.status == "wrong"):
                return timing, attempts
            self._peer.close()
            self._preparing = 0
            self.prepare(self._spec)
            if alone or timing.status == "timeout":
                return timing, attempts

    def close(self) -> None:
        """Kill the process."""
        self._peer.close()

    def _attempt(self, candidate: Candidate) -> Timing:
        request = {
            "do": "measure",
            "family": candidate.family,
            "library": str(library(self._folder, candidate)),
            "job": self._how.job_of(candidate).to_json(),
        }
        try:
            while self._preparing:
                self._preparing -= 1
                message = self._peer.receive(REFERENCE_SECONDS)["message"]
                if message and not self._preparing:
                    return Timing("failed", f"while it was prepared: {message}")
            return Timing.from_json(self._peer.ask(request, self._how.timeout))
        except NoAnswer as error:
            return Timing(error.status, error.message)
        except (TypeError, KeyError) as error:
            return Timing("crashed", f"an answer that is none: {type(error).__name__}: {error}")


class _Turns:
    """Two processes: one measures a workload, the other prepares the next."""

    def __init__(
        self,
        folder: Path,
        how: Conditions,
        report: Callable[[Record], None],
        stop: Callable[[], bool],
    ) -> None:
        self._how, self._report, self._stop = how, report, stop
        self._all = [Measurer(folder, how) for _ in range(2)]

    def run(self, ready: queue.SimpleQueue[Group], count: int) -> None:
        """Measure so many workloads as they become ready."""
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
        """The next workload; None where there is none yet and nobody waits, or at the end."""
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
        timing, attempts = measurer.measure(candidate)
        return Record(candidate, build, job, timing, attempts, gpu)
