"""A plan with everything that says why: see `explain`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.chain.check import refuse_reductions
from crossfuse.planner.cost.alone import alone
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.fit import EAGER
from crossfuse.planner.cost.loop import room_for, turns_of
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.dataflow.counts import least
from crossfuse.planner.explain.layout import Share, layout
from crossfuse.planner.explain.levels import Level, levels
from crossfuse.planner.explain.places import Place, places
from crossfuse.planner.kernels.every import Kernel, families, memories
from crossfuse.planner.kernels.memory import uses
from crossfuse.planner.kernels.pruned import pruned
from crossfuse.planner.kernels.read import read_kernel
from crossfuse.planner.kernels.shape import Shape, shape_of
from crossfuse.planner.plan import Plan, Runner, ranked, runner_of
from crossfuse.planner.space.count import Step, count

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
class Explanation:
    """Why a plan is the plan.

    Attributes
    ----------
    plan : Plan
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

    plan: Plan
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
        fields["plan"] = json.loads(self.plan.to_json())
        return {"version": VERSION, **fields}

    def text(self, width: int = 100) -> str:
        """As tables of plain text.

        Parameters
        ----------
        width : int
            Columns of a line at most.
        """
        from crossfuse.planner.explain.tables import plain

        return plain(self, width)

    def svg(self) -> str:
        """As a picture: time by level and by term, and the layout of a cluster."""
        from crossfuse.planner.explain.picture import picture

        return picture(self)


def explain(
    plan: Plan,
    *,
    target: str | Device | None = None,
    rates: Rates | None = None,
    best: Sequence[Plan] = (),
) -> Explanation:
    """Say why a plan is what it is.

    Parameters
    ----------
    plan : Plan
        From `crossfuse.planner.plan.plan`.
    target : str | Device | None
        Device that it was made for, if its limits were not those of the name in the plan.
    rates : Rates | None
        What the plan was made with; None takes the device's packaged record.
    best : Sequence[Plan]
        Further plans to compare it with, as `crossfuse.planner.plan.ranked` gives them.

    Returns
    -------
    Explanation
        Values; `Explanation.text`, `to_json` and `svg` show them.

    Raises
    ------
    PlanRefused
        If the plan's tiles are not those of its family, or the device has no rates.
    EnvironmentRefused
        If the device is unknown.
    """
    spec = device(target or plan.device)
    known = rates or rates_of(spec)
    chain, shape = plan.chain, shape_of(plan.chain, k_major=plan.k_major)
    refuse_reductions(chain)
    kernel = None if plan.family == EAGER else read_kernel(plan.family, plan.tiles)
    if kernel is None:
        found = dict(eager(shape, known, spec.sms).busy)
    else:
        found = alone(kernel, shape, spec, known)
    times = {name: float(each) for name, each in found.items()}
    ctas = max((each.busy for each in plan.kernels), default=1)
    rooms = memories(kernel, shape, spec) if kernel else ()
    return Explanation(
        plan,
        levels(chain, kernel, shape, plan.bytes, times, known, ctas),
        places(chain, kernel, shape, rooms, spec),
        _usage(plan, kernel, shape, spec, known) if kernel else (),
        layout(kernel, shape) if kernel else (),
        tuple(runner_of(each, plan) for each in best),
        {family: pruned(family, shape, spec) for family in families(shape)},
        count(chain, spec),
        known.measured.provisional,
    )


def explain_best(
    workload: Any,
    target: str | Device = "nvidia-h100",
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    top: int = 1,
) -> Explanation:
    """Plan a workload and explain the plan, beside those that come next.

    Parameters
    ----------
    workload, target, only, rates
        See `crossfuse.planner.plan.plan`.
    top : int
        Plans to compare, with the chosen one.

    Raises
    ------
    PlanRefused
        If nothing fits, or fewer than one plan is asked for.
    """
    if top < 1:
        raise refuse(
            PlanRefused,
            "explain",
            "top",
            found=top,
            limit="1 or more plans",
            instead="ask for 1, which is the chosen plan alone",
        )
    plans = ranked(workload, target, only=only, rates=rates, keep=top)
    return explain(plans[0], target=target, rates=rates, best=plans[1:top])


def _usage(
    plan: Plan, kernel: Kernel, shape: Shape, spec: Device, rates: Rates
) -> tuple[Usage, ...]:
    room = int(room_for(kernel.cluster, spec, rates))
    launched = kernel.clusters(shape, spec)
    active = max(int(each) for each in launched)
    found = []
    parts = zip(
        plan.kernels, kernel.kernels(shape), memories(kernel, shape, spec), launched, strict=True
    )
    for taken, phases, memory, clusters in parts:
        waves = tuple(int(turns_of(each, least(active, room))) for each in phases)
        shared = uses(phases, memory)
        found.append(Usage(shared, int(clusters), room, waves, spec.sms - taken.busy))
    return tuple(found)
