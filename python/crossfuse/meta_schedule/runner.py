"""A Runner of MetaSchedule for the GPU of this machine."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerInput, RunnerResult

from crossfuse.bench.job import OURS
from crossfuse.bench.problem import is_function, path_of
from crossfuse.calls import checked
from crossfuse.files import read_text
from crossfuse.measure.job import LIBRARY, Request, Timing, Way
from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.measure.timer import REFERENCE_SECONDS, Measurer
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.builder import recorded_workload
from crossfuse.runtime.manifest import Manifest

#: Called with a library, its workload and its timing as soon as it is measured.
Report = Callable[[Path, str, Timing], None]


@derived_object
@checked
class GpuRunner(PyRunner):
    """Measures libraries one after another, in a process that each of them may ruin.

    Weights are cold and calls replayed from a CUDA graph, as `crossfuse bench` measures. Every
    result is held against float64 before and after it is timed; a wrong one is an error and has no
    time. A candidate that hangs costs its timeout, and one that dies costs a restart of the
    process.

    Parameters
    ----------
    conditions : Conditions | None
        Cache, protocol, repeats, and limits of time.
    report : Callable | None
        Called with the library's path, its workload and its timing, for records that say more than
        MetaSchedule keeps.

    Examples
    --------
    >>> runner = GpuRunner()                                                # doctest: +SKIP
    >>> database = ms.tune_tir(                                             # doctest: +SKIP
    ...     func, target, "out", 64, builder=NvccBuilder(spec), runner=runner, **plugs()
    ... )
    >>> runner.close()                                                      # doctest: +SKIP
    """

    def __init__(self, conditions: Conditions | None = None, report: Report | None = None) -> None:
        super().__init__()
        self._how = conditions or Conditions()
        self._report = report
        self._folder = TemporaryDirectory(prefix="crossfuse-references-")
        self._measurer = Measurer(self._how.measurer)
        self._measurer.start()
        self._prepared = ""
        self._referee = Peer(self._how.builder)
        #: Why a function has no reference; empty where it has one.
        self._without: dict[str, str] = {}
        self._waiting: queue.SimpleQueue[tuple[Path, Future[Timing]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, runner_inputs: Sequence[RunnerInput]) -> list[Any]:
        """Measure libraries in the background.

        Parameters
        ----------
        runner_inputs : Sequence[RunnerInput]
            What `crossfuse.meta_schedule.builder.NvccBuilder` built.

        Returns
        -------
        list[RunnerFuture]
            In the same order.
        """
        futures = []
        for each in runner_inputs:
            future: Future[Timing] = Future()
            self._waiting.put((Path(str(each.artifact_path)), future))
            futures.append(_GpuFuture(future))
        return futures

    def close(self) -> None:
        """End the process that measures; what has not been measured stays undone."""
        with suppress(queue.Empty):
            while (item := self._waiting.get_nowait()) is not None:
                item[1].cancel()
        self._waiting.put(None)
        self._measurer.close()
        self._referee.retire()
        self._thread.join(self._how.timeout)
        self._folder.cleanup()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            path, future = item
            try:
                future.set_result(self._measure(path))
            except Exception as error:
                future.set_exception(error)

    def _measure(self, path: Path) -> Timing:
        spec = _workload(path)
        if not spec:
            return Timing("refused", "nothing to check it against: " + _NO_WORKLOAD)
        if is_function(spec):
            if spec not in self._without:
                self._without[spec] = self._refer(spec, path.parent)
            if self._without[spec]:
                return Timing("refused", f"nothing to check it against: {self._without[spec]}")
        job = replace(self._how.job, spec=spec, variant=OURS)
        request = Request(job, Way(LIBRARY, str(path)), self._folder.name)
        if spec != self._prepared:
            self._measurer.prepare(request)
            self._prepared = spec
        timing, _ = self._measurer.measure(request, self._how.timeout)
        if self._report is not None:
            self._report(path, spec, timing)
        return timing

    def _refer(self, name: str, home: Path) -> str:
        """Have the reference of a function computed; returns why there is none, or nothing."""
        there = path_of(home, name)
        if not there.is_file():
            return f"no function beside the library; {_NO_WORKLOAD}"
        folder = Path(self._folder.name)
        shutil.copy(there, path_of(folder, name))
        request = {"do": "reference", "spec": name, "folder": str(folder)}
        try:
            return str(self._referee.ask(request, REFERENCE_SECONDS)["message"])
        except NoAnswer as error:
            return f"{error.status}: {error.message}"


@derived_object
class _GpuFuture(PyRunnerFuture):
    """A measurement that is under way."""

    def __init__(self, future: Future[Timing]) -> None:
        super().__init__()
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> RunnerResult:
        try:
            timing = self._future.result()
        except Exception as error:
            return RunnerResult(None, f"failed: {type(error).__name__}: {error}")
        if timing.status != "ok" or timing.microseconds is None:
            return RunnerResult(None, f"{timing.status}: {timing.message}")
        return RunnerResult([timing.microseconds * 1e-6], None)


_NO_WORKLOAD = "give the builder the workload, NvccBuilder('S3:M=128'), or the search's tasks"


def _workload(library: Path) -> str:
    """What a library computes, by its manifest."""
    path = library.with_suffix(".json")
    return recorded_workload(Manifest.from_json(read_text(path), str(path)).metadata)
