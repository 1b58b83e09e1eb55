"""How candidates are built and measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from crossfuse.bench.job import OURS, Job
from crossfuse.meta_schedule.candidate import Candidate


def serving(kind: str) -> tuple[str, ...]:
    """The program `crossfuse.meta_schedule.serve` of one of its kinds."""
    return (sys.executable, "-m", "crossfuse.meta_schedule.serve", kind)


@dataclass(frozen=True)
class Conditions:
    """How candidates are built and measured.

    Attributes
    ----------
    target : str
        Device to compile for.
    job : Job
        Cache, protocol, repeats and calls; its spec and variant do not matter.
    timeout : float
        Seconds for one measurement.
    build_timeout : float
        Seconds for one compilation.
    builders : int
        Processes that compile.
    gpu : str
        Name of the device, for the records.
    builder, measurer : tuple[str, ...]
        Programs of the processes that compile and that measure, see
        `crossfuse.meta_schedule.serve`.
    """

    target: str = "nvidia-h100"
    job: Job = field(default_factory=lambda: Job("", OURS))
    timeout: float = 30.0
    build_timeout: float = 300.0
    builders: int = 1
    gpu: str = ""
    builder: tuple[str, ...] = field(default_factory=lambda: serving("build"))
    measurer: tuple[str, ...] = field(default_factory=lambda: serving("measure"))

    def job_of(self, candidate: Candidate) -> Job:
        """How one candidate is measured; kernels of ours have no time where they are wrong."""
        variant = "eager" if candidate.family == "eager" else OURS
        return replace(self.job, spec=candidate.spec, variant=variant)
