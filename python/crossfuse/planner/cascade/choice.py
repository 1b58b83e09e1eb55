"""Which kernel computes a cascade, and why that one, as values that travel as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from crossfuse.cascade.rewrite.passes import Pass
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.choice import Runner, no_plan
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.schema import Damaged, parse, typed, versioned

#: Version of the JSON form.
VERSION = 2

Kind = TypeVar("Kind", bound="CascadeChoice")


@dataclass(frozen=True)
class Taken:
    """What a kernel of a cascade takes of the device.

    Attributes
    ----------
    ctas, cluster, threads : int
        Of the grid, of a cluster, of a CTA.
    side : int
        CTAs that a multiprocessor holds.
    registers : int
        Of a thread, estimated; of tiles those of scores and sums alone.
    shared_bytes : int
        Of a CTA, at least.
    waves : float
        Rounds of CTAs that the device makes.
    """

    ctas: int
    cluster: int
    threads: int
    side: int
    registers: int
    shared_bytes: int
    waves: float


@dataclass(frozen=True)
class CascadeChoice:
    """How a cascade is computed: the values of `crossfuse.planner.cascade.plan.CascadePlan`.

    Attributes
    ----------
    shape : CascadeShape
        What is computed.
    device : str
        Target name.
    family : str
        One of `crossfuse.planner.families.CASCADE_FAMILIES`, or `EAGER`: separate kernels.
    tiles : Mapping[str, Any]
        Fields of `StreamTiles`, `CascadeTiles` or `RowsTiles`.
    microseconds : float
        Estimated time from the end of the kernel before.
    terms : Mapping[str, float]
        What it is made of; they add up to it.
    bound : str
        The stream that takes longest, or ``latency`` where none takes half of the time.
    bytes : Mapping[str, int]
        Moved by level.
    alone : Mapping[str, float]
        Microseconds of each stream as if there were no other.
    place : str
        Where what outlives a sweep or a CTA is kept: see `crossfuse.planner.cascade.plan`.
    taken : Taken | None
        What the kernel takes; None of separate kernels.
    runners : tuple[Runner, ...]
        The best plan of each other place, and not fusing, the fastest first.
    """

    shape: CascadeShape
    device: str
    family: str
    tiles: Mapping[str, Any]
    microseconds: float
    terms: Mapping[str, float]
    bound: str
    bytes: Mapping[str, int]
    alone: Mapping[str, float]
    place: str
    taken: Taken | None = None
    runners: tuple[Runner, ...] = ()

    def to_json(self) -> str:
        """The values as text that `from_json` reads."""
        return json.dumps({"version": VERSION, "kind": "cascade", **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls: type[Kind], text: str) -> Kind:
        """Read what `to_json` wrote.

        Raises
        ------
        PlanRefused
            If the text is no plan of a cascade of this version.
        """
        try:
            document = parse(text)
            if isinstance(document, dict) and document.pop("kind", None) != "cascade":
                raise Damaged("a plan of something else", "one of a cascade")
            return typed(cls, versioned(document, VERSION, "version"))
        except Damaged as error:
            raise no_plan(error.found, error.limit) from None


# Not fusing a cascade: one kernel after another, each of which reads and writes memory.


def pass_times(passes: Sequence[Pass], device: Device, rates: Rates) -> list[dict[str, float]]:
    """Microseconds of each pass by memory and by tensor cores, as if there were no other.

    Reductions and outputs reach the measured rate of memory, as two-pass kernels of torch.compile
    do (cross entropy 684 us of 671, moments of inertia 682 of 686); products what cuBLAS was fitted
    to (`Fitted.eager`, `eager_tensor`).
    """
    found = []
    measured, fitted = rates.measured, rates.fitted
    peak = fitted.eager_tensor * float(rates.tensor_rate(128, 256, 2)) * device.sms
    for each in passes:
        reached = fitted.eager if each.flops else 1.0
        memory = each.read / measured.hbm_read + each.written / measured.hbm_write
        found.append({"hbm": memory / reached, "tensor": each.flops / peak})
    return found


def eager_estimate(passes: Sequence[Pass], device: Device, rates: Rates) -> Estimate:
    """Estimate separate kernels in a CUDA graph."""
    terms = {"hbm": 0.0, "tensor": 0.0}
    busy = dict(terms)
    for each in pass_times(passes, device, rates):
        terms["hbm"] += each["hbm"]
        terms["tensor"] += max(0.0, each["tensor"] - each["hbm"])
        for name in busy:
            busy[name] += each[name]
    terms["kernels"] = len(passes) * rates.fitted.eager_kernel
    return Estimate({name: time for name, time in terms.items() if time}, busy)
