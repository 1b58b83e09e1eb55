"""Memory traffic of a job, read by Nsight Compute from another run of it.

``python -m crossfuse.bench.counters JOB`` is that run: one computation between marks.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from crossfuse.bench.job import Counters
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.measure.job import Job
from crossfuse.measure.timer import execute

# Nsight Compute: finding it, its command line, and parsing its log.

_SYSTEM_ROOT = Path("/usr/local/cuda")
_PACKAGES = Path("/opt/nvidia/nsight-compute")
# To bytes and nanoseconds; releases differ in how they spell a unit.
_UNITS = {
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
    **{"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "second": 1e9},
    **{"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9},
}
_NAME = "Kernel Name"
#: In what Nsight Compute says where it may not read the counters.
PERMISSION = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Readings:
    """What one run of Nsight Compute measured."""

    #: Names, in the order of launch.
    kernels: tuple[str, ...]
    #: Sum over the kernels by metric, in bytes or nanoseconds.
    totals: Mapping[str, float]
    #: Most replays of a kernel that the metrics took; 1 where the log does not say.
    passes: int


def find_ncu() -> Path:
    """Find Nsight Compute in ``PATH``, the CUDA toolkit or NVIDIA's own package, or refuse."""
    for path in _candidates():
        if path.is_file():
            return path
    raise _refused(
        "no ncu",
        f"Nsight Compute in PATH, CUDA_HOME, CUDA_PATH, {_SYSTEM_ROOT} or {_PACKAGES}",
        "install Nsight Compute",
    )


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("ncu")
    if on_path:
        yield Path(on_path)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(_SYSTEM_ROOT)):
        if root:
            yield Path(root) / "bin" / "ncu"
    yield from sorted(_PACKAGES.glob("*/ncu"), reverse=True)


def command(
    ncu: Path, metrics: Sequence[str], log: Path, program: Sequence[str]
) -> tuple[str, ...]:
    """Write the command that reads metrics of what a program marks.

    Every kernel between the program's ``cudaProfilerStart`` and ``cudaProfilerStop`` is run by
    itself. Caches are left as the kernel before has left them, and clocks as they are: flushing,
    which is the default, would throw out the intermediate of a chain between its kernels.
    Cooperative launches fail under Nsight Compute 2025.3 (``LaunchFailed``); without the attribute
    they do not. The locale is one in which numbers have a full stop. Messages and the table go to
    `log`.
    """
    return (
        *("env", "LC_ALL=C", "CROSSFUSE_COOPERATIVE=0", str(ncu)),
        *("--metrics", ",".join(metrics)),
        *("--profile-from-start", "off", "--target-processes", "application-only"),
        *("--replay-mode", "kernel", "--cache-control", "none", "--clock-control", "none"),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *program,
    )


def parse(text: str, metrics: Sequence[str]) -> Readings:
    """Parse a log of Nsight Compute: lines that begin with ``==``, and a table.

    The table has a line of names, one of units, and then one for each kernel. A log that lacks a
    kernel or a metric is refused, with Nsight Compute's own reason.
    """
    messages = [line for line in text.splitlines() if line.startswith("==")]
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if len(rows) < 2 or _NAME not in rows[0]:
        raise _silent(messages)
    units, *kernels = rows
    if any(row.get(name) == "nan" for row in kernels for name in metrics):
        raise _silent(messages)  # a kernel that did not run
    totals = {name: sum(_value(row, units, name) for row in kernels) for name in metrics}
    passes = [int(count) for line in messages for count in re.findall(r"- (\d+) pass", line)]
    return Readings(tuple(row[_NAME] for row in kernels), totals, max(passes, default=1))


def _value(row: Mapping[str, str], units: Mapping[str, str], name: str) -> float:
    found, unit = row.get(name), units.get(name)
    try:
        return float(str(found).replace(",", "")) * _UNITS[str(unit)]
    except (ValueError, KeyError):
        raise _refused(
            f"{found!r} in {unit!r} for {name}",
            "a number of bytes or of seconds",
            "take another release of Nsight Compute",
        ) from None


def _silent(messages: Sequence[str]) -> RefusedError:
    """The refusal of a log without readings, which quotes its gravest messages."""
    levels = ("==ERROR==", "==WARNING==", "==")
    of_level = ([line for line in messages if line.startswith(level)] for level in levels)
    gravest: list[str] = next(filter(None, of_level), [])
    reasons = [line.split("==", 2)[-1].strip() for line in gravest]
    denied = next((reason for reason in reasons if PERMISSION in reason), None)
    if denied is not None:
        return _refused(
            denied,
            "a driver that lets this user read the GPU's performance counters",
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as administrator",
        )
    found = " ".join(reasons[:2]) if reasons else "no word of ncu"
    return _refused(found, "a table of at least one kernel", "run the command without --counters")


def _refused(found: str, limit: str, instead: str) -> RefusedError:
    return refuse(EnvironmentRefused, "counters", "ncu", found=found, limit=limit, instead=instead)


# A job's traffic.

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
DURATION = "gpu__time_duration.sum"
TO_SM, L2 = "l1tex__m_xbar2l1tex_read_bytes.sum", "lts__t_bytes.sum"
#: What depends on the state of the caches, and fits one pass.
MEMORY = (READ, WRITE, DURATION)
METRICS = (*MEMORY, TO_SM, L2)
#: Takes the file of a job, and marks one computation for the profiler.
PROGRAM = (sys.executable, "-m", "crossfuse.bench.counters")
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


# The run that is counted.

#: Calls before the one that counts; compilers and autotuners have run by then.
WARMUPS = 3


def main() -> None:
    """Run the job whose file is named on the command line; a refusal goes to standard error."""
    from crossfuse.files import read_text
    from crossfuse.schema import read

    job = read(Job, read_text(Path(sys.argv[1])))
    try:
        compute_once(job)
    except RefusedError as error:
        sys.exit(str(error))


def compute_once(job: Job, device: str = "cuda") -> None:
    """Warm up, bring the L2 cache into the job's state, and compute once between profiler marks.

    Nothing is checked: the worker has done that.
    """
    import torch

    from crossfuse.bench.worker import problem_of
    from crossfuse.measure.timing import flusher

    problem = problem_of(job.spec, checked=False)
    with torch.no_grad():
        one_set = replace(job.how, l2="hot")
        variant = problem.variant(job.variant, device)
        call = problem.bind(variant, one_set, device).calls[0]
        for _ in range(WARMUPS):
            call()
        if job.l2 == "cold":
            flusher(device)()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
