"""Jobs one after another, each in a process group of its own that a timeout ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from crossfuse.bench.job import Counters, Job, Planned, Row, Timing

#: Reads a job from standard input, writes a timing to standard output.
WORKER = (sys.executable, "-m", "crossfuse.bench.worker")
_TAIL = 600
# A killed process that the driver does not let go is left behind.
_SECONDS_TO_DIE = 10.0


def run(
    planned: Sequence[Planned],
    timeout: float,
    *,
    report: Callable[[Row], None] = lambda row: None,
    command: Sequence[str] | None = None,
    count: Callable[[Job, float], Counters] | None = None,
) -> tuple[Row, ...]:
    """Measure everything; a job that breaks becomes a row that says so.

    Parameters
    ----------
    planned : Sequence[Planned]
        From `crossfuse.bench.plan.plan`.
    timeout : float
        Seconds for each job.
    report : Callable
        Called with every row as soon as it is there.
    command : Sequence[str] | None
        A worker instead of `WORKER`.
    count : Callable | None
        Reads the memory traffic of a job that has a time, such as `crossfuse.bench.counters.count`.

    Returns
    -------
    tuple[Row, ...]
        In the order of the jobs.
    """
    rows = []
    counted: dict[Job, Counters] = {}
    with tempfile.TemporaryDirectory(prefix="crossfuse-bench-") as folder:
        # The folder keeps float64 references between the variants of a workload.
        worker = (*WORKER, folder) if command is None else command
        for each in planned:
            row = Row(each, run_job(each.job, timeout, worker))
            if count is not None and row.timing.microseconds is not None:
                # The protocol changes how kernels are launched, and not what they read.
                once = replace(each.job, protocol="stream", repeats=1, calls=1)
                counted[once] = counted.get(once) or count(once, timeout)
                row = replace(row, counters=counted[once])
            rows.append(row)
            report(row)
    return tuple(rows)


def run_job(job: Job, timeout: float, command: Sequence[str] = WORKER) -> Timing:
    """Measure one job in a new process.

    Parameters
    ----------
    job : Job
        What to measure.
    timeout : float
        Seconds until the process and its children are killed.
    command : Sequence[str]
        The worker.

    Returns
    -------
    Timing
        The worker's answer; ``timeout`` or ``crashed`` where there is none.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="crossfuse-job-") as folder:
        # Files and not pipes: a child that outlives the worker would keep a pipe open.
        paths = [Path(folder) / name for name in ("job", "answer", "log")]
        paths[0].write_text(json.dumps(job.to_json()), encoding="utf-8")
        try:
            code = execute(command, paths, timeout)
        except OSError as error:
            timing = Timing("crashed", f"the worker does not start: {error}")
        else:
            timing = _answer(paths[1]) or _no_answer(code, timeout, _read(paths[2]))
    return replace(timing, seconds=round(time.perf_counter() - start, 2))


def execute(command: Sequence[str], paths: Sequence[Path], timeout: float) -> int | None:
    """Run a command in a process group of its own.

    Parameters
    ----------
    command : Sequence[str]
        Program and arguments.
    paths : Sequence[pathlib.Path]
        Files for standard input, output and error.
    timeout : float
        Seconds until the process and its children are killed.

    Returns
    -------
    int | None
        Exit code; None where it was killed.
    """
    job, answer, log = paths
    with job.open() as source, answer.open("w") as sink, log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=source, stdout=sink, stderr=errors, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also on an interrupt, which does not reach the other session.
            if process.returncode is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker that was not waited for yet, and every process of its group."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        return


def _answer(path: Path) -> Timing | None:
    """The timing that the worker wrote, if it got so far."""
    try:
        return Timing.from_json(json.loads(_read(path)))
    except (ValueError, TypeError):
        return None


def _no_answer(code: int | None, timeout: float, log: str) -> Timing:
    if code is None:
        return Timing("timeout", f"no answer in {timeout:g} s")
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Timing("crashed", f"{end} without an answer. {log.strip()[-_TAIL:]}".strip())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
