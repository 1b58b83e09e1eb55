"""Measured kernels with clusters of several CTAs and without, compared space by space.

See `study.spaces`; which spaces a kernel is in is read from its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp, inf, isfinite, log
from pathlib import Path
from typing import Any

from crossfuse import schema
from crossfuse.bench.job import Timing
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_text
from crossfuse.hardware import Device, device
from crossfuse.measure.timing import DISTURBED
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import read_kernel
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.schema import Damaged, Positive, typed
from crossfuse.workload.suites import parse
from study.spaces import ALL, NO_CLUSTERS, NO_DSM, SPACES, spaces_of

#: Name in the notes of a candidate that chance chose, as the random configuration.
RANDOM = "random"
#: Families that fuse nothing.
UNFUSED = ("global", "gemm")
BASELINES = ("eager", "unfused")
#: What is worth how much: the slower space over the faster one.
FACTORS = {
    "DSM": (NO_DSM, ALL),
    "multicast": (NO_CLUSTERS, NO_DSM),
    "cluster": (NO_CLUSTERS, ALL),
}


@dataclass(frozen=True)
class Measured:
    """A line of a file of results.

    Attributes
    ----------
    candidate : Candidate
        What was measured.
    microseconds : float | None
        Median; None of what does not work.
    drawn : bool
        Whether chance chose it, for the random configuration.
    gpu : str
        Name of the device.
    minimum : float | None
        Least time, where the file has it.
    """

    candidate: Candidate
    microseconds: float | None
    drawn: bool
    gpu: str
    minimum: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether half of its times were far above the least.

        See `crossfuse.measure.timing.quietest`.
        """
        least = self.minimum or self.microseconds
        return bool(self.microseconds and least and self.microseconds > DISTURBED * least)


def read_measured(paths: Sequence[Path]) -> Iterator[Measured]:
    """Read results of ``crossfuse bundle``, and files that hold parts of them.

    Parameters
    ----------
    paths : Sequence[pathlib.Path]
        JSON lines.

    Yields
    ------
    Measured
        In the order of the files.

    Raises
    ------
    ArtefactRefused
        Naming the first line that is none, or was cut off.
    """
    for path in paths:
        try:
            lines = read_text(path).splitlines()
        except Damaged as error:
            raise _no_result(str(path), error.found) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _read(line, f"{path}, line {number}")


def _read(line: str, where: str) -> Measured:
    try:
        # Parts of a record will do.
        row = typed(Mapping[str, Any], schema.parse(line))
        part = typed(_Part, {key: each for key, each in row.items() if key in _PARTS})
    except Damaged as error:
        raise _no_result(where, error.found) from None
    found = Candidate.from_json(part.candidate, where)
    time = part.microseconds if part.status == "ok" else None
    drawn = found.notes.get("name") == RANDOM
    least = part.minimum or (part.timing.minimum if part.timing else None)
    return Measured(found, time, drawn, part.gpu, least)


@dataclass(frozen=True)
class _Part:
    """What is read of a line."""

    candidate: Mapping[str, Any]
    status: str
    microseconds: Positive | None
    minimum: Positive | None = None
    timing: Timing | None = None
    gpu: str = ""


_PARTS = tuple(each.name for each in fields(_Part))


def _no_result(where: str, found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "results",
        where,
        found=found,
        limit="a result of `crossfuse bundle measure`: candidate, status, microseconds",
        instead="remove the line; its candidate counts as not measured",
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel that was measured.

    Attributes
    ----------
    candidate : Candidate
        It.
    microseconds : float
        Infinite if it does not work.
    estimate : float
        Microseconds.
    spaces : tuple[str, ...]
        Those that it is in.
    drawn : bool
        Whether chance chose it, for the random configuration.
    """

    candidate: Candidate
    microseconds: float
    estimate: float
    spaces: tuple[str, ...]
    drawn: bool


def kernels(measured: Sequence[Measured], target: str) -> tuple[dict[str, list[Kernel]], int]:
    """Say of measured kernels which spaces they are in.

    Parameters
    ----------
    measured : Sequence[Measured]
        Results; the last one of a candidate counts.
    target : str
        Device of the estimates.

    Returns
    -------
    dict[str, list[Kernel]]
        By workload.
    int
        Candidates that were passed over: with options, or with tiles left to the rule.
    """
    drawn = {each.candidate.id for each in measured if each.drawn}
    last = {each.candidate.id: each for each in measured if each.candidate.family != EAGER}
    known = device(target)
    rates = rates_of(known)
    found: dict[str, list[Kernel]] = {}
    passed = 0
    for name, each in last.items():
        kernel = _kernel(each, name in drawn, known, rates)
        if kernel is None:
            passed += 1
        else:
            found.setdefault(each.candidate.spec, []).append(kernel)
    return found, passed


def _kernel(measured: Measured, drawn: bool, known: Device, rates: Rates) -> Kernel | None:
    given = measured.candidate
    try:
        spaces = spaces_of(given.family, given.tiles)
    except RefusedError:
        return None
    spec = parse(given.spec)
    shape = shape_of(chain_of(spec), k_major=spec.weights == "nk")
    times = estimate(read_kernel(given.family, given.tiles), shape, known, rates)
    microseconds = measured.microseconds or inf
    return Kernel(given, microseconds, float(times.microseconds), spaces, drawn)


def compare(here: Sequence[Kernel], eager: float | None, first: int) -> dict[str, Any] | None:
    """Compare the spaces of one workload.

    Parameters
    ----------
    here : Sequence[Kernel]
        Its kernels.
    eager : float | None
        Microseconds of PyTorch.
    first : int
        How many of each space, by the estimate, stand for a search that is equally hard.

    Returns
    -------
    dict[str, Any] | None
        Microseconds of the ``best`` of each space, and of the best of the ``first``; of the
        baselines; of the ``random`` ones, as a geometric mean. None where a space has no kernel
        that works, or eager no time.
    """
    best, few, count = {}, {}, {}
    for name in SPACES:
        inside = sorted((k for k in here if name in k.spaces), key=lambda each: each.estimate)
        count[name] = len(inside)
        best[name] = _least(inside)
        few[name] = _least(inside[:first])
    if eager is None or not all(map(isfinite, (*best.values(), *few.values()))):
        return None
    chance = [each.microseconds for each in here if each.drawn and isfinite(each.microseconds)]
    apart = _least([each for each in here if each.candidate.family in UNFUSED])
    fastest = min(here, key=lambda each: each.microseconds)
    return {
        "eager": eager,
        "unfused": min(eager, apart),
        "kernels": count,
        "best": best,
        "first": few,
        "random": mean(chance) if chance else None,
        "random kernels": len(chance),
        "fastest": fastest.candidate.summary,
    }


def _least(found: Sequence[Kernel]) -> float:
    return min((each.microseconds for each in found), default=inf)


def summary(workloads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over workloads.

    Parameters
    ----------
    workloads : Sequence[Mapping[str, Any]]
        One or more, of `compare`.

    Returns
    -------
    dict[str, Any]
        For each space, and ``random``, the speed over each baseline; the `FACTORS`.
    """
    found: dict[str, Any] = {"workloads": len(workloads), "spaces": {}}
    for name in SPACES:
        found["spaces"][name] = {
            "kernels": sum(each["kernels"][name] for each in workloads),
            "fewest": min(each["kernels"][name] for each in workloads),
            **{
                f"{kind} over {other}": mean([each[other] / each[kind][name] for each in workloads])
                for kind in ("best", "first")
                for other in BASELINES
            },
        }
    chance = [each for each in workloads if each["random"]]
    if chance:
        found["spaces"][RANDOM] = {
            "workloads": len(chance),
            "kernels": sum(each["random kernels"] for each in chance),
            "fewest": min(each["random kernels"] for each in chance),
            **{f"best over {o}": mean([e[o] / e["random"] for e in chance]) for o in BASELINES},
        }
        found["random factor, best"] = mean([e["random"] / e["best"][ALL] for e in chance])
    for kind in ("best", "first"):
        for factor, (slow, fast) in FACTORS.items():
            found[f"{factor} factor, {kind}"] = mean(
                [each[kind][slow] / each[kind][fast] for each in workloads]
            )
    return found


def mean(values: Sequence[float]) -> float:
    """The geometric mean of times or ratios, of which there is one at least."""
    return exp(sum(map(log, values)) / len(values))
