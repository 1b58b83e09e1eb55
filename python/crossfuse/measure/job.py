"""What is timed, asked of a worker and answered, as values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.measure.timing import CALLS, REPEATS, TimingConditions
from crossfuse.runtime.manifest import ResourceUsage
from crossfuse.schema import Extent, Positive

# Ways to compute something, and their times.

#: Kinds of ways, and what their `source` is.
LIBRARY = "library"  # path of a kernel library
GRAPH = "graph"  # path of a torch.fx.GraphModule that torch.save wrote
PROGRAM = "program"  # path of a program that torch.export.save wrote
SPEC = "spec"  # text of a workload, computed by torch


@dataclass(frozen=True)
class Given:
    """An input of a way, whose values are drawn by whoever times it."""

    shape: tuple[int, ...]
    #: As torch calls it.
    dtype: str
    #: In elements; empty if contiguous.
    stride: tuple[int, ...] = ()
    #: Whether it is read from memory, as weights are; else it stays in the L2 cache if it fits.
    cold: bool = True


@dataclass(frozen=True)
class Way:
    """A way to compute something: a kernel of ours, or torch."""

    #: A constant of this module, which says what `source` is.
    kind: str
    source: str
    #: Inputs; empty for a spec, which knows its own.
    given: tuple[Given, ...] = ()
    #: Mode of ``torch.compile`` for ways of torch; None is eager.
    mode: str | None = None


@dataclass(frozen=True)
class Taken:
    """Outcome of timing a way."""

    #: Median of the times; the next field is the least of them. None without a time.
    microseconds: float | None = None
    least: float | None = None
    #: Why there is no time.
    message: str = ""


# Jobs of a worker.

#: ``refused`` is an answer; the last four are faults.
STATUSES = ("ok", "refused", "wrong", "failed", "crashed", "timeout")


@dataclass(frozen=True)
class Job:
    """One measurement: a workload, how it is computed, and how that is timed."""

    #: Text of the workload, see `crossfuse.workload.parse`, or the name of a function.
    spec: str
    #: A key of `crossfuse.bench.job.VARIANTS`; the next two are keys of its `L2` and `PROTOCOLS`.
    variant: str
    l2: str = "cold"
    protocol: str = "graph"
    #: See `crossfuse.measure.timing.TimingConditions`.
    repeats: Extent = REPEATS
    calls: Extent = CALLS

    @property
    def how(self) -> TimingConditions:
        """How it is timed."""
        return TimingConditions(self.l2, self.protocol, self.repeats, self.calls)


@dataclass(frozen=True)
class Request:
    """What a worker is asked, see `crossfuse.bench.worker`: a job, or a way without one."""

    #: Whose workload is computed, and checked; without a job nothing is known of results.
    job: Job | None = None
    #: What computes it instead of the job's variant.
    way: Way | None = None
    #: Where float64 references are kept, and functions that are workloads.
    folder: str = ""
    #: Whether it may be timed; else it is prepared as far as that needs no GPU.
    measure: bool = True


@dataclass(frozen=True)
class Timing:
    """Outcome of a job: its time, or why it has none."""

    #: One of `STATUSES`.
    status: str
    #: What was run, or why there is no time.
    message: str = ""
    #: Median of the times of one computation; the next field is the least of them.
    microseconds: Positive | None = None
    minimum: Positive | None = None
    #: Largest error of an element over what the float64 rule allows there, before and after the
    #: measurement; at most 1. None where the rule was broken or nothing was checked.
    worst_before: float | None = None
    worst_after: float | None = None
    #: Sets of weights.
    copies: int = 0
    #: Computations between two timestamps.
    calls: int = 0
    #: Wall time of the whole job, filled in by whoever waited for it.
    seconds: float = 0.0
    #: What ptxas said of each kernel of ours.
    resources: tuple[ResourceUsage, ...] = ()

    @property
    def fault(self) -> bool:
        """Whether something broke, so that the job has neither a sound time nor a refusal."""
        return self.status not in ("ok", "refused")

    @property
    def complaints(self) -> str:
        """Kernels that spill registers or whose wgmma is serialised; empty where there are none."""
        bad = (each for each in self.resources if each.complaints)
        return "; ".join(f"{each.kernel}: {', '.join(each.complaints)}" for each in bad)
