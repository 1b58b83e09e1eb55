"""Nsight Compute: finding it, its command line, and parsing its log."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossfuse.errors import EnvironmentRefused, RefusedError, refuse

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
