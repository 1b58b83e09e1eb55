"""Stores records in MetaSchedule's JSON database, which replays them, and beside it.

Beside it is what the database does not keep: why a candidate has no time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.runner import RunnerResult

from crossfuse.bench.job import OURS
from crossfuse.bench.problem import name_of
from crossfuse.errors import RefusedError
from crossfuse.hardware import device, tvm_target
from crossfuse.measure.job import STATUSES, Job, Timing
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate, candidate_of, function_of, replayable
from crossfuse.meta_schedule.records import Record, append
from crossfuse.planner.families import EAGER
from crossfuse.schedule.planned import trace_json
from crossfuse.workload.spec import WorkloadSpec

#: Files of a database, as MetaSchedule names them.
FILES = ("database_workload.json", "database_tuning_record.json")
#: What MetaSchedule takes for the time of a candidate that has none.
FAILED_SECONDS = 1e10


def open_database(work_dir: str | os.PathLike[str]) -> Any:
    """Open or make the database of a folder, as ``ms.tune_tir(work_dir=...)`` does.

    A process that was killed may have left a part of a line at the end of a file, with which
    MetaSchedule would read none of it. It is cut off.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    os.makedirs(work_dir, exist_ok=True)
    for name in FILES:
        _cut(Path(work_dir) / name)
    return JSONDatabase(work_dir=str(work_dir))


def _cut(path: Path) -> None:
    """Cut off what follows the last line end of a file."""
    if not path.is_file():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)


def commit(database: Any, records: Iterable[Record], target: str) -> int:
    """Store records, for a search to begin with and `query_schedule` to replay; returns how many.

    Candidates that hang, die or are wrong are stored with `FAILED_SECONDS`, as MetaSchedule does,
    so that they are not measured again; what has no schedule (baselines, refused tiles) is left
    out.
    """
    return sum(_commit(database, each, target) for each in records)


class Store:
    """The database of a folder, to which records of a device are added as they come.

    A process that is killed loses none that was added: `catch_up` adds the record that was written
    elsewhere but not yet here.
    """

    def __init__(self, work_dir: str | os.PathLike[str], target: str) -> None:
        self._database = open_database(work_dir)
        self._target = target

    def add(self, record: Record) -> None:
        """Commit a record, see `commit`."""
        commit(self._database, [record], self._target)

    def catch_up(self, records: Sequence[Record]) -> int:
        """Commit the last records, back to the first that is here already; returns how many.

        They are in the order in which they came.
        """
        there = {trace_json(each.trace) for each in self._database.get_all_tuning_records()}
        missing: list[Record] = []
        for each in reversed(records):
            trace = _trace(each, self._target)
            if trace is None:
                continue
            if trace_json(trace) in there:
                break
            missing.insert(0, each)
        return commit(self._database, missing, self._target)


def _trace(record: Record, target: str) -> Any:
    """Trace of a candidate; None where it has no schedule."""
    if record.candidate.family == EAGER:
        return None
    with suppress(RefusedError):
        return replayable(record.candidate, device(target)).trace
    return None


def _commit(database: Any, record: Record, target: str) -> bool:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import TuningRecord

    trace = _trace(record, target)
    if trace is None:
        return False
    spec = device(target)
    module = workload_module(record.candidate.spec)
    workload = database.commit_workload(module)
    time = record.microseconds
    seconds = [FAILED_SECONDS if time is None else time * 1e-6]
    arguments = ArgInfo.from_prim_func(module["main"])
    database.commit_tuning_record(
        TuningRecord(trace, workload, seconds, tvm_target(spec), arguments)
    )
    return True


def workload_module(spec: str) -> Any:
    """The unscheduled module by which MetaSchedule identifies a workload.

    It equals that of ``ms.tune_tir(prim_func(parse(spec)), ...)``.
    """
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    return _normalize_mod(function_of(spec))


# A callback of MetaSchedule that records what its database does not: why there is no time.


@derived_object
class KeepRecords(PyMeasureCallback):
    """Appends a record of each candidate to a file of JSON lines, with its trace.

    The database of MetaSchedule stores all that fails with the same time; here hangs, crashes,
    wrong results and errors of the compiler are told apart. Without a workload, functions are named
    by what they compute, see `crossfuse.bench.problem`. `report` gets each record, such
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
