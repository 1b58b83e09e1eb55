"""Memory traffic of a job, read by Nsight Compute from another run of it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from crossfuse.bench.job import Counters
from crossfuse.bench.ncu import PERMISSION, Readings, command, find_ncu, parse
from crossfuse.errors import RefusedError
from crossfuse.measure.job import Job
from crossfuse.measure.peer import execute

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
DURATION = "gpu__time_duration.sum"
TO_SM, L2 = "l1tex__m_xbar2l1tex_read_bytes.sum", "lts__t_bytes.sum"
#: What depends on the state of the caches, and fits one pass.
MEMORY = (READ, WRITE, DURATION)
METRICS = (*MEMORY, TO_SM, L2)
#: Takes the file of a job, and marks one computation for the profiler.
PROGRAM = (sys.executable, "-m", "crossfuse.bench.counted")
_TAIL = 600


def count(
    job: Job, timeout: float, *, ncu: Path | None = None, program: Sequence[str] = PROGRAM
) -> Counters:
    """Run a job once more under Nsight Compute and read its memory traffic.

    Where the metrics together take several passes, the caches are in the job's state in the first
    of them alone; what depends on that is then read again by itself. The job's repeats and calls do
    not matter, `timeout` is in seconds for each run. Where nothing can be read, the status and
    message of the result say why.
    """
    try:
        path = ncu or find_ncu()
    except RefusedError as error:
        return Counters("refused", str(error))
    found = _run(job, timeout, path, METRICS, program)
    if isinstance(found, Counters):
        return found
    if found.passes == 1:
        return _counters(found)
    return _repaired(_counters(found), _run(job, timeout, path, MEMORY, program))


def _repaired(several: Counters, alone: Readings | Counters) -> Counters:
    """Counters of several passes, with the memory traffic taken from the run that read it alone."""
    if isinstance(alone, Counters):
        status, message = alone.status, alone.message
    elif alone.passes > 1:
        status = "refused"
        message = f"traffic of the memory took {alone.passes} passes; caches are right in one alone"
    else:
        memory = _counters(alone)
        return replace(memory, l2_to_sm_bytes=several.l2_to_sm_bytes, l2_bytes=several.l2_bytes)
    return replace(
        several,
        status=status,
        message=message,
        dram_read_bytes=None,
        dram_write_bytes=None,
        microseconds=None,
    )


def _run(
    job: Job, timeout: float, ncu: Path, metrics: Sequence[str], program: Sequence[str]
) -> Readings | Counters:
    """One run under Nsight Compute: its readings, or counters whose message says why not."""
    with tempfile.TemporaryDirectory(prefix="crossfuse-ncu-") as folder:
        log, task, out, errors = (Path(folder) / name for name in ("log", "job", "out", "err"))
        task.write_text(json.dumps(asdict(job)), encoding="utf-8")
        words = command(ncu, metrics, log, (*program, str(task)))
        try:
            code = execute(words, out, errors, timeout)
        except OSError as error:
            return Counters("failed", f"ncu does not start: {error}")
        if code is None:
            return Counters("timeout", f"no counters in {timeout:g} s")
        said = _read(log)
        try:
            return parse(said, metrics)
        except RefusedError as error:
            # The program's own reason comes first, unless it is not what failed.
            reason = _read(errors).strip()[-_TAIL:]
            if code == 0 or not reason or PERMISSION in said:
                return Counters("refused", str(error))
            return Counters("failed", f"exit code {code}. {reason}")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _counters(found: Readings) -> Counters:
    totals = {name: round(value) for name, value in found.totals.items()}
    return Counters(
        "ok",
        "",
        totals[READ],
        totals[WRITE],
        totals.get(TO_SM),
        totals.get(L2),
        found.totals[DURATION] / 1e3,
        found.kernels,
        found.passes,
    )
