"""How candidates are built and measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from crossfuse.bench.job import OURS, Job
from crossfuse.meta_schedule.candidate import Candidate


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
        variant = "eager" if candidate.family == "eager" else OURS
        return replace(self.job, spec=candidate.spec, variant=variant)
