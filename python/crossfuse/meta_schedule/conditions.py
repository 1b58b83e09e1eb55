"""How candidates are built and measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from crossfuse.bench.job import OURS, Job
from crossfuse.meta_schedule.candidate import Candidate


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
    builder, measurer : tuple[str, ...] | None
        Programs instead of `crossfuse.meta_schedule.serve`.
    """

    target: str = "nvidia-h100"
    job: Job = field(default_factory=lambda: Job("", OURS))
    timeout: float = 30.0
    build_timeout: float = 300.0
    builders: int = 1
    gpu: str = ""
    builder: tuple[str, ...] | None = None
    measurer: tuple[str, ...] | None = None

    def job_of(self, candidate: Candidate) -> Job:
        """How one candidate is measured; kernels of ours have no time where they are wrong."""
        variant = "eager" if candidate.family == "eager" else OURS
        return replace(self.job, spec=candidate.spec, variant=variant)
