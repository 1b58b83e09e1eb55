"""Plans of cascades that keep states in one place: what a comparison of places compiles."""

from __future__ import annotations

from typing import Any

from crossfuse.cascade.rewrite.tiled.sizes import DSM, KERNEL
from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.cascade.plan import CascadePlan, parted_plans, ranked_cascade
from crossfuse.planner.cascade.shape import CascadeShape, shape_of_cascade
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.families import STATE_PLACES, STREAM, TILES

#: Where states merge in each of `STATE_PLACES`; None without merging.
_MERGES: dict[str, str | None] = dict(zip(STATE_PLACES, (None, DSM, KERNEL), strict=True))


def placed_cascade(
    workload: Any, place: str, target: str | Device | None = None, *, rates: Rates | None = None
) -> list[CascadePlan]:
    """Plans that keep the states of a cascade in one place, the best first.

    Parameters
    ----------
    workload : str | CascadeSpec | CascadeShape
        What is computed.
    place : str
        ``"registers"``: one CTA has a row's whole axis. ``"dsm"``: clusters share it, and merge
        through distributed shared memory, also where rows alone would fill the device.
        ``"global"``: CTAs share it, and a second kernel merges their states.
    target : str | Device | None
        Device.
    rates : Rates | None
        What the device does; None takes its packaged record.

    Returns
    -------
    list[CascadePlan]
        At least one.

    Raises
    ------
    PlanRefused
        If there is no such kernel.
    WorkloadRefused, CascadeRefused
        For what is no cascade, or cannot stream.

    Examples
    --------
    >>> best = placed_cascade("R3:batch=1", "global")[0]
    >>> best.place, best.tiles["merge"]
    ('states in global memory', 'kernel')
    """
    spec = device(target)
    shape = workload if isinstance(workload, CascadeShape) else shape_of_cascade(workload)
    known = rates or rates_of(spec)
    found: list[CascadePlan] = []
    if place in _MERGES:
        merge = _MERGES[place]
        families = [each for each in (STREAM, TILES) if each in shape.families]
        if merge == KERNEL or (merge == DSM and TILES in families):
            found = parted_plans(shape, spec, known, merge)
        elif families:
            words = "states in registers" if merge is None else "states in DSM"
            every = ranked_cascade(shape, spec, only=families, rates=known)
            found = [each for each in every if each.place.startswith(words)]
    if found:
        return found
    raise refuse(
        PlanRefused,
        "plan",
        shape.name,
        found=f"placement {place!r}, and no kernel that keeps states there",
        limit=f"{', '.join(STATE_PLACES)} of a stream; the last two where CTAs can share the axis",
        instead="leave the placement out ('auto')",
    )
