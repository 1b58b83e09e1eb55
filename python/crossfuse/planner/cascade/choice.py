"""Chosen kernel of a cascade with the reasons for it, as values that travel as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from crossfuse.cascade.rewrite.work import Pass
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
    """Resources of the device that a kernel of a cascade takes."""

    #: CTAs of the grid and of a cluster, threads of a CTA.
    ctas: int
    cluster: int
    threads: int
    #: CTAs that an SM holds at once.
    side: int
    #: Per thread, estimated; for tiles only those of scores and sums.
    registers: int
    #: Per CTA, at least.
    shared_bytes: int
    #: Rounds of CTAs that the device makes: a fraction, 1 at least.
    waves: float


@dataclass(frozen=True)
class CascadeChoice:
    """How a cascade is computed: the values of `crossfuse.planner.cascade.plan.CascadePlan`."""

    shape: CascadeShape
    #: Target name.
    device: str
    #: One of `crossfuse.planner.families.registry.CASCADE_FAMILIES`, or `EAGER`: separate kernels.
    family: str
    #: Fields of the family's `kind`, such as `StreamTiles`.
    tiles: Mapping[str, Any]
    #: Estimated, from the end of the kernel before.
    microseconds: float
    #: Parts of the time; they add up to it.
    terms: Mapping[str, float]
    #: The stream that takes longest, or ``latency`` where none takes half of the time.
    bound: str
    #: Traffic by memory level.
    bytes: Mapping[str, int]
    #: Microseconds of each stream as if there were no other.
    alone: Mapping[str, float]
    #: Where what outlives a sweep or a CTA is stored, in words: see `place_of` of
    #: `crossfuse.planner.cascade.plan`.
    place: str
    #: None of separate kernels.
    taken: Taken | None = None
    #: The best plan of each other place, and not fusing, the fastest first.
    runners: tuple[Runner, ...] = ()

    def to_json(self) -> str:
        """Write the values as text that `from_json` reads."""
        return json.dumps({"version": VERSION, "kind": "cascade", **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls: type[Kind], text: str) -> Kind:
        """Read what `to_json` wrote; refuses plans of chains and other versions."""
        try:
            document = parse(text)
            if isinstance(document, dict) and document.pop("kind", None) != "cascade":
                raise Damaged("a plan of something else", "one of a cascade")
            return typed(cls, versioned(document, VERSION, "version"))
        except Damaged as error:
            raise no_plan(error.found, error.limit, VERSION) from None


# The alternative to fusing: one kernel after another, each of which reads and writes memory.


def pass_times(passes: Sequence[Pass], device: Device, rates: Rates) -> list[dict[str, float]]:
    """Microseconds of each unfused pass, by memory and by tensor cores, as if there were no other.

    Reductions and outputs reach the measured rate of memory, as two-pass kernels of torch.compile
    do (cross entropy 684 us of 671, moments of inertia 682 of 686); products reach what cuBLAS was
    fitted to (`Fitted.eager`, `eager_tensor`).
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
    """Estimate the separate kernels of an unfused cascade in a CUDA graph."""
    terms = {"hbm": 0.0, "tensor": 0.0}
    busy = dict(terms)
    for each in pass_times(passes, device, rates):
        terms["hbm"] += each["hbm"]
        terms["tensor"] += max(0.0, each["tensor"] - each["hbm"])
        for name in busy:
            busy[name] += each[name]
    terms["kernels"] = len(passes) * rates.fitted.eager_kernel
    return Estimate({name: time for name, time in terms.items() if time}, busy)
