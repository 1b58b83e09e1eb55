"""A callback of MetaSchedule that records what its database does not: why there is no time."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.runner import RunnerResult

from crossfuse.bench.functions import name_of
from crossfuse.bench.job import OURS
from crossfuse.measure.job import STATUSES, Job, Timing
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.records import Record, append
from crossfuse.meta_schedule.scheduled import candidate_of
from crossfuse.workload.spec import WorkloadSpec


@derived_object
class KeepRecords(PyMeasureCallback):
    """Appends a record of each candidate to a file of JSON lines, with its trace.

    The database of MetaSchedule stores all that fails with the same time; here hangs, crashes,
    wrong results and errors of the compiler are told apart. Without a workload, functions are named
    by what they compute, see `crossfuse.bench.functions`. `report` gets each record, such
    as `crossfuse.meta_schedule.records.Progress.add`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        workload: str | WorkloadSpec | None = None,
        report: Callable[[Record], None] = lambda record: None,
    ) -> None:
        from crossfuse.workload.suites import resolve

        super().__init__()
        self._path = Path(path)
        if isinstance(workload, str):
            workload = resolve(workload)
        self._spec = "" if workload is None else str(workload)
        self._report = report

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[Any],
        builder_results: Sequence[BuilderResult],
        runner_results: Sequence[RunnerResult],
    ) -> None:
        """Record the outcomes of some candidates of a task."""
        spec = self._spec or name_of(task_scheduler.tasks_[task_id].ctx.mod)
        results = zip(measure_candidates, builder_results, runner_results, strict=True)
        for each, built, ran in results:
            record = record_of(candidate_of(spec, each.sch), built, ran)
            append(self._path, record)
            self._report(record)


def record_of(candidate: Candidate, built: BuilderResult, ran: RunnerResult) -> Record:
    """The results of a candidate in MetaSchedule as a record.

    It has the statuses of our builder and runner; errors of others have the status ``failed``. A
    runner repeats the builder's error for what was not built.
    """
    job = Job(candidate.spec, OURS)
    if built.error_msg is not None:
        return Record(candidate, Build(*_told(str(built.error_msg))), job, None, 0)
    if ran.error_msg is not None:
        return Record(candidate, Build("ok"), job, Timing(*_told(str(ran.error_msg))))
    times = [float(each) * 1e6 for each in ran.run_secs]
    timing = Timing("ok", "", statistics.median(times), min(times))
    return Record(candidate, Build("ok"), job, timing)


def _told(error: str) -> tuple[str, str]:
    """Status and message from an error's text, as our builder and runner write it."""
    status, _, message = error.partition(": ")
    return (status, message) if status in STATUSES else ("failed", error)
