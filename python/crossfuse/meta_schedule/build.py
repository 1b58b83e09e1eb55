"""Compiles one candidate to a library; whatever goes wrong is returned as text."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from crossfuse.bench.job import OURS, Job
from crossfuse.errors import RefusedError
from crossfuse.hardware import device
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.planner.families import EAGER

#: Longest text of an error that is kept.
LONGEST = 4000


@dataclass(frozen=True)
class Build:
    """Outcome of a compilation."""

    #: ``ok``; ``refused`` where there is no such kernel; ``failed`` for any other exception,
    #: ``timeout`` and ``crashed`` where its process was killed or ended.
    status: str
    #: Why there is no library.
    message: str = ""
    #: Wall time.
    seconds: float = 0.0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared_object(folder: Path, candidate: Candidate) -> Path:
    """Path of a candidate's library in a folder."""
    return folder / "libraries" / f"{candidate.id}.so"


def build_candidate(candidate: Candidate, folder: Path, target: str, timeout: float) -> Build:
    """Schedule, lower and compile a candidate, unless its library is there already.

    It never raises: a candidate that does not compile is an answer too. The timeout is in seconds,
    for nvcc.
    """
    start = time.perf_counter()
    try:
        if candidate.family != EAGER and not _is_built(shared_object(folder, candidate)):
            _build(candidate, folder, target, timeout)
        found = Build("ok")
    except RefusedError as error:
        found = Build("refused", str(error)[:LONGEST])
    except Exception as error:
        found = Build("failed", f"{type(error).__name__}: {error}"[:LONGEST])
    return Build(found.status, found.message, round(time.perf_counter() - start, 2))


def _is_built(path: Path) -> bool:
    """Whether library and manifest are both there: the manifest is written last."""
    return path.is_file() and path.with_suffix(".json").is_file()


def _build(candidate: Candidate, folder: Path, target: str, timeout: float) -> None:
    from crossfuse.lower.extract import lower
    from crossfuse.meta_schedule.scheduled import schedule_candidate
    from crossfuse.runtime import build_library

    spec = device(target)
    lowered = lower(schedule_candidate(candidate, spec), spec, name="main")
    build_library(
        lowered.image,
        shared_object(folder, candidate),
        device=spec,
        metadata={"candidate": candidate.to_json()},
        timeout=timeout,
    )


# How candidates are built and measured.


def serving(kind: str) -> tuple[str, ...]:
    """Command of `crossfuse.meta_schedule.serve` for one of its kinds."""
    return (sys.executable, "-m", "crossfuse.meta_schedule.serve", kind)


@dataclass(frozen=True)
class Conditions:
    """How candidates are built and measured; times are in seconds."""

    #: Device to compile for.
    target: str = "nvidia-h100"
    #: Cache, protocol, repeats and calls; its spec and variant do not matter.
    job: Job = field(default_factory=lambda: Job("", OURS))
    #: For one measurement.
    timeout: float = 30.0
    #: For one compilation.
    build_timeout: float = 300.0
    #: Processes that compile.
    builders: int = 1
    #: Name of the device, for the records.
    gpu: str = ""
    #: Program of the processes that compile, see `crossfuse.meta_schedule.serve`.
    builder: tuple[str, ...] = field(default_factory=lambda: serving("build"))
    #: Program of the processes that measure.
    measurer: tuple[str, ...] = field(default_factory=lambda: serving("measure"))

    def job_of(self, candidate: Candidate) -> Job:
        """The job of one candidate; kernels of ours have no time where they are wrong."""
        variant = "eager" if candidate.family == EAGER else OURS
        return replace(self.job, spec=candidate.spec, variant=variant)
