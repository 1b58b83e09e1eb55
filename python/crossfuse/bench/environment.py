"""The machine that a measurement needs, and the record of the one that it ran on."""

from __future__ import annotations

import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.hardware import find_gpus

_HOPPER = (9, 0)
_FIELDS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu"


def require_gpu() -> None:
    """Refuse a machine on which no kernel can be measured: one without torch or a Hopper GPU."""
    if found := _not_hopper() or ("no torch" if find_spec("torch") is None else ""):
        raise refuse(
            EnvironmentRefused,
            "bench",
            "this machine",
            found=found,
            limit="torch and a GPU of compute capability 9.0",
            instead="run the command on such a machine; crossfuse bench --dry-run lists jobs and "
            "floors on any",
        )


def measured_gpu() -> str:
    """Name of the GPU that kernels are measured on, where `require_gpu` finds one."""
    require_gpu()
    name: str = record()["gpu"].get("name", "")
    return name


def require_hopper() -> None:
    """Refuse a machine without a Hopper GPU to calibrate."""
    if found := _not_hopper():
        raise refuse(
            EnvironmentRefused,
            "calibrate",
            "this machine",
            found=found,
            limit="a GPU of compute capability 9.0",
            instead="run the command on such a machine, while nothing else runs on its GPU",
        )


def _not_hopper() -> str:
    """What there is instead of a Hopper GPU; empty if there is one."""
    gpus = find_gpus()
    if any(each.capability == _HOPPER for each in gpus):
        return ""
    names = ("{} ({}.{})".format(each.name, *each.capability) for each in gpus)
    return ", ".join(names) or "no CUDA device"


def record() -> dict[str, Any]:
    """Describe GPU, clocks, versions and commit, for the document of a run.

    ``gpu`` is what nvidia-smi says, ``versions`` what `crossfuse doctor` found, by check.
    """
    from crossfuse.doctor import collect

    report = collect()
    query = _output(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"])
    first = query.partition("\n")[0]
    return {
        "gpu": dict(zip(_FIELDS.split(","), first.split(", "), strict=False)) if first else {},
        "versions": {each.name: each.found for each in report.checks},
        "crossfuse": report.version,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """Commit of the checkout that the package runs from; unknown where it is installed."""
    here = str(Path(__file__).parent)
    return _output(["git", "-C", here, "rev-parse", "HEAD"]) or "unknown"


def _output(command: list[str]) -> str:
    """Standard output of a command; empty where the command is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
