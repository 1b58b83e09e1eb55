"""The outcome of each candidate as a line of JSON, and as a record of MetaSchedule's database."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback
from tvm.s_tir.meta_schedule.runner import RunnerResult

from crossfuse.bench.job import OURS
from crossfuse.bench.problem import name_of
from crossfuse.calls import checked
from crossfuse.errors import RefusedError
from crossfuse.files import on_disk, read_bytes
from crossfuse.hardware import device, tvm_target
from crossfuse.measure.job import STATUSES, Job, Timing
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate, candidate_of, function_of, replayable
from crossfuse.planner.families import EAGER
from crossfuse.schedule.planned import trace_json
from crossfuse.schema import Count, Damaged, parse, shown, typed
from crossfuse.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Record:
    """A candidate and what came of it.

    Attributes
    ----------
    candidate : Candidate
        What was to be measured.
    build : Build
        What came of its compilation.
    job : Job
        How it was measured.
    timing : Timing | None
        What was measured; None where nothing was built.
    attempts : int
        Measurements; more than one where the first failed beside other candidates.
    gpu : str
        Name of the device.

    Examples
    --------
    >>> made = Candidate("gemm:M=64,K=64,N=128", "gemm")
    >>> job = Job("gemm:M=64,K=64,N=128", "ours")
    >>> Record(made, Build("ok"), job, Timing("ok", "", microseconds=2.5)).microseconds
    2.5
    >>> Record(made, Build("refused", "no such tiles"), job).status  # nothing to measure
    'build-refused'
    """

    candidate: Candidate
    build: Build
    job: Job
    timing: Timing | None = None
    attempts: int = 1
    gpu: str = ""

    @property
    def key(self) -> tuple[str, Job, str]:
        """What was measured, how and where: of records with the same one the last one counts."""
        return self.candidate.id, self.job, self.gpu

    @property
    def status(self) -> str:
        """One of `crossfuse.measure.job.STATUSES`, after ``build-`` where nothing was built."""
        return f"build-{self.build.status}" if self.timing is None else self.timing.status

    @property
    def message(self) -> str:
        """Why there is no time, or what was run."""
        return self.build.message if self.timing is None else self.timing.message

    @property
    def check(self) -> str:
        """Whether the output agrees with float64: ``passed``, ``failed`` or ``not run``."""
        status = self.status
        return {"ok": "passed", "wrong": "failed"}.get(status, "not run")

    @property
    def microseconds(self) -> float | None:
        """Median time; None of a candidate that is not right."""
        return None if self.timing is None or self.status != "ok" else self.timing.microseconds

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return {
            "id": self.candidate.id,
            "candidate": self.candidate.to_json(),
            "status": self.status,
            "microseconds": self.microseconds,
            "check": self.check,
            "build": asdict(self.build),
            "job": asdict(self.job),
            "timing": None if self.timing is None else asdict(self.timing),
            "attempts": self.attempts,
            "gpu": self.gpu,
        }

    @staticmethod
    def from_json(value: object) -> Record:
        """Read what `to_json` wrote.

        Parameters
        ----------
        value : object
            A line of a file of records, parsed.

        Returns
        -------
        Record
            The record.

        Raises
        ------
        Damaged
            If it is something else, or a part of it.
        """
        stored = typed(_Stored, value)
        try:
            candidate = Candidate.from_json(stored.candidate, "candidate")
        except RefusedError as error:
            raise Damaged(str(error), "a record of a candidate") from error
        if candidate.id != stored.id:
            raise Damaged(f"id {shown(stored.id)}", f"{candidate.id}, that of its candidate")
        return Record(
            candidate, stored.build, stored.job, stored.timing, stored.attempts, stored.gpu
        )


@dataclass(frozen=True)
class _Stored:
    """A record as a file has it; the last fields follow from others, and are there for people."""

    id: str
    candidate: Mapping[str, Any]
    build: Build
    job: Job
    timing: Timing | None
    attempts: Count
    gpu: str
    status: str = ""
    microseconds: float | None = None
    check: str = ""


@dataclass(frozen=True)
class Found:
    """Records of a file, and the lines that are not records."""

    #: The last one of each candidate, job and GPU.
    records: tuple[Record, ...]
    #: For each other line, its number and what is wrong with it.
    broken: tuple[str, ...]


def append(path: Path, record: Record) -> None:
    """Add a record to a file, made if need be, so that it survives whatever happens next."""
    append_line(path, record.to_json())


def append_line(path: Path, value: Any) -> None:
    """Add a JSON value as a line to a file, as `append` does."""
    line = json.dumps(value) + "\n"
    with on_disk(path), path.open("ab+") as file:
        # A line that was cut off must not swallow this one.
        if file.tell() and not _ends_with_newline(file):
            line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


@checked
def read_records(path: Path) -> Found:
    """Read the records of a file.

    Parameters
    ----------
    path : pathlib.Path
        JSON lines, possibly cut off or damaged; no file has no records.

    Returns
    -------
    Found
        What can be read.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "records.jsonl")
    ...     _ = path.write_text("no record")
    ...     len(read_records(path).records)
    0
    """
    if not path.exists():
        return Found((), ())
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except Damaged as error:
        return Found((), (f"{path}: {error}",))
    records: dict[tuple[str, Job, str], Record] = {}
    broken = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = Record.from_json(parse(line))
        except Damaged as error:
            broken.append(f"{path}, line {number}: {error}")
            continue
        records[found.key] = found
    return Found(tuple(records.values()), tuple(broken))


def unknown(records: Iterable[Record], path: Path) -> list[Record]:
    """Records that a file does not have yet."""
    known = {each.key for each in read_records(path).records}
    return [each for each in records if each.key not in known]


def fastest(records: Iterable[Record]) -> dict[str, Record]:
    """The fastest correct candidate of each workload, by the text of its spec."""
    best: dict[str, Record] = {}
    for each in records:
        time = each.microseconds
        if time is None:
            continue
        held = best.get(each.candidate.spec)
        if held is None or held.microseconds is None or time < held.microseconds:
            best[each.candidate.spec] = each
    return best


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


# Shows progress while candidates are measured: a bar, and the best of each workload so far.


class Progress:
    """A bar on standard error, with a line above it for each record.

    Where standard error is no terminal, the lines alone are written. `total` is the number of
    records to come.
    """

    def __init__(self, total: int, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.records: list[Record] = []
        self._total = total
        self._best: dict[str, float] = {}
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, record: Record) -> None:
        """Show a record."""
        from rich.text import Text

        self.records.append(record)
        known = self._best.get(record.candidate.spec)
        time = record.microseconds
        is_best = time is not None and (known is None or time < known)
        if is_best and time is not None:
            self._best[record.candidate.spec] = time
        style = "red" if record.timing is not None and record.timing.fault else ""
        self._console.print(Text(self._line(record, known, is_best), style=style))
        best = self._best.get(record.candidate.spec)
        told = "" if best is None else f"best {best:.2f} us, {record.candidate.spec}"
        self._bar.update(self._task, advance=1, description=told)

    def _line(self, record: Record, known: float | None, is_best: bool) -> str:
        """Such as ``[3/40] gemm:M=8 gemm rows=64: 4.50 us, best so far (was 5.10)``."""
        head = f"[{len(self.records)}/{self._total}] {record.candidate.spec}"
        head = f"{head} {record.candidate.summary}: "
        if record.microseconds is None:
            return f"{head}{record.status}: {record.message}"
        found = f"{head}{record.microseconds:.2f} us"
        if not is_best:
            return found
        return f"{found}, best so far" + ("" if known is None else f" (was {known:.2f})")


# Stores records in MetaSchedule's JSON database, which replays them, and beside it.
#
# Beside it is what the database does not keep: why a candidate has no time.


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
