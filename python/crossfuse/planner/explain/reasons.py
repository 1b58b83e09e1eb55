"""Everything that says why a plan is the plan, as values: what tables and pictures show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse.planner.choice import Choice, Runner
from crossfuse.planner.explain.layout import Share
from crossfuse.planner.explain.levels import Level
from crossfuse.planner.explain.places import Place
from crossfuse.planner.space.count import Step
from crossfuse.schema import parse

#: Version of the JSON form.
VERSION = 1


@dataclass(frozen=True)
class Usage:
    """What a kernel takes beyond `crossfuse.planner.kernels.resources.Resources`.

    Attributes
    ----------
    shared : Mapping[str, int]
        Bytes of a CTA's shared memory by use; they add up to all of it.
    clusters : int
        That are launched.
    resident : int
        Clusters of this size that the device runs at once, one CTA an SM.
    waves : tuple[int, ...]
        Tiles that the busiest cluster makes, phase by phase.
    idle_sms : int
        SMs without work.
    """

    shared: Mapping[str, int]
    clusters: int
    resident: int
    waves: tuple[int, ...]
    idle_sms: int


@dataclass(frozen=True)
class Reasons:
    """Why a plan is the plan.

    Attributes
    ----------
    plan : Choice
        The plan.
    levels : tuple[Level, ...]
        What it moves and multiplies.
    places : tuple[Place, ...]
        Where each tensor lives.
    usage : tuple[Usage, ...]
        Of each of its kernels, in the order of `Plan.kernels`; empty of a library's.
    layout : tuple[Share, ...]
        What the CTAs of the first cluster have.
    best : tuple[Runner, ...]
        The next best plans of any family, the fastest first, if they were asked for.
    pruned : Mapping[str, tuple[Step, ...]]
        Tiles that each rule leaves, by family.
    published : tuple[Step, ...]
        Candidates that the published rules leave of the published space, for comparison.
    provisional : bool
        Whether the device's rates are not all measured.
    """

    plan: Choice
    levels: tuple[Level, ...]
    places: tuple[Place, ...]
    usage: tuple[Usage, ...]
    layout: tuple[Share, ...]
    best: tuple[Runner, ...]
    pruned: Mapping[str, tuple[Step, ...]]
    published: tuple[Step, ...]
    provisional: bool

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write.

        ``version``; ``plan``, which `Plan.from_json` reads as text; and the other fields by name,
        each a list or object of the fields of what it holds.
        """
        fields = asdict(self)
        fields["plan"] = parse(self.plan.to_json())
        return {"version": VERSION, **fields}
