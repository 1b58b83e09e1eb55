"""Plans of cascades: which kernel computes one, in which tiles, and whether to fuse at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import merge
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.work import Pass
from crossfuse.errors import PlanRefused, RefusedError, Rule
from crossfuse.hardware import Device, device
from crossfuse.planner.cascade.shape import CascadeShape, shape_of_cascade
from crossfuse.planner.choice import Runner, check_families, no_plan, plain_numbers, runner_of
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.family import CascadeFamily, T, Taken
from crossfuse.planner.families.registry import CASCADE_FAMILIES, STATE_PLACES, cascade_families
from crossfuse.planner.kernels.shape import Step, shape_of
from crossfuse.schema import Damaged, parse, typed, versioned

if TYPE_CHECKING:
    from crossfuse.planner.explain.explanation import CascadeReasons

_refused = Rule(PlanRefused, "plan")

#: Version of the JSON form.
VERSION = 2
#: Words of the place of separate kernels.
MEMORY = "memory"


@dataclass(frozen=True)
class CascadePlan:
    """How a cascade is computed, as values that travel as text."""

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
    #: Where what outlives a sweep or a CTA is stored, in words: see `CascadeFamily.place_of`.
    place: str
    #: None of separate kernels.
    taken: Taken | None = None
    #: The best plan of each other place, and not fusing, the fastest first.
    runners: tuple[Runner, ...] = ()

    def to_json(self) -> str:
        """Write the values as text that `from_json` reads."""
        return json.dumps({"version": VERSION, "kind": "cascade", **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CascadePlan:
        """Read what `to_json` wrote; refuses plans of chains and other versions."""
        try:
            document = parse(text)
            if isinstance(document, dict) and document.pop("kind", None) != "cascade":
                raise Damaged("a plan of something else", "one of a cascade")
            return typed(cls, versioned(document, VERSION, "version"))
        except Damaged as error:
            raise no_plan(error.found, error.limit, VERSION) from None

    def explain(self, target: str | Device | None = None) -> CascadeReasons:
        """Say why this is the plan: see `crossfuse.planner.explain.explanation.explain_plan`."""
        from crossfuse.planner.explain.explanation import explain_plan

        return explain_plan(self, target=target)


def ranked_cascade(
    workload: Any,
    target: str | Device | None = None,
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    keep: int = 0,
    fused: bool = False,
) -> list[CascadePlan]:
    """Rank the plans of a cascade, the best first; at least one, else refused.

    An empty `only` allows all families, `keep` of 0 all kernels (but the eight best of rows before
    a product). With `fused`, not fusing is only a runner. The first plan carries the best of the
    other places as `runners`; a merge by a second kernel, where clusters share an axis, is one of
    these and never a plan.
    """
    spec = device(target)
    shape = workload if isinstance(workload, CascadeShape) else shape_of_cascade(workload)
    known = rates or rates_of(spec)
    wanted = tuple(only) or (*CASCADE_FAMILIES, EAGER)
    check_families(wanted, (*CASCADE_FAMILIES, EAGER), " of a cascade")
    steps: dict[str, tuple[Step, ...]] = {}
    ranks: list[list[CascadePlan]] = []
    compared: list[CascadePlan] = []
    for family in (each for each in cascade_families(shape) if each.name in wanted):
        steps[family.name], order = family.in_order(spec, known)
        order = order[: family.at_most(keep)]
        ranks.append([_of_kernel(family, each, spec, known) for each in order])
        others = family.runners(order, spec, known)
        compared += [_of_kernel(family, each, spec, known) for each in others]
    # Each family keeps its order.
    plans = list(merge(*ranks, key=lambda each: each.microseconds))
    eager = [_of_passes(shape, spec, known)] if EAGER in wanted else []
    if not plans and (fused or not eager):
        raise _none_fits(shape, steps, spec)
    runners = _runners([*plans, *eager, *compared], fused)
    plans = plans[: keep or None]
    if fused:
        eager = []
    # Tiles that are as fast keep the order of their space; not fusing must be faster.
    first = bool(eager and plans and eager[0].microseconds < plans[0].microseconds)
    found = [*eager, *plans] if first or not plans else [*plans, *eager]
    found[0] = replace(found[0], runners=runners)
    return found


def plan_cascade(
    workload: Any,
    target: str | Device | None = None,
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
) -> CascadePlan:
    """Choose the best of `ranked_cascade`."""
    return ranked_cascade(workload, target, only=only, rates=rates, keep=1)[0]


def _runners(plans: Sequence[CascadePlan], fused: bool) -> tuple[Runner, ...]:
    """Find the best plan of each place other than that of the chosen one, the fastest first."""
    kinds: dict[str, CascadePlan] = {}
    for each in plans:
        kinds.setdefault(each.place, each)
    first = plans[0]
    eager = kinds.get(MEMORY)
    if not fused and eager is not None and eager.microseconds < first.microseconds:
        first = eager
    others = sorted(
        (each for each in kinds.values() if each is not first),
        key=lambda each: each.microseconds,
    )
    return tuple(replace(runner_of(each, first), family=_called(each)) for each in others)


def _called(plan: CascadePlan) -> str:
    return EAGER if plan.family == EAGER else f"{plan.family}: {plan.place}"


def _of_kernel(family: CascadeFamily[T, Any], tiles: T, spec: Device, rates: Rates) -> CascadePlan:
    found = family.estimate(tiles, spec, rates)
    frame = _frame(family.shape, spec, found)
    moved = family.moved(tiles, spec)
    return replace(
        frame,
        family=family.name,
        tiles=family.fields(tiles),
        bytes={name: size for name, size in moved.items() if size},
        place=family.place_of(tiles),
        taken=family.taken(tiles, spec),
    )


def _of_passes(shape: CascadeShape, spec: Device, rates: Rates) -> CascadePlan:
    found = _separate(shape, spec, rates)
    ours = (each.apart(spec, rates) for each in cascade_families(shape))
    known = [found, *(each for each in ours if each is not None)]
    found = min(known, key=lambda each: float(each.microseconds))
    found = rates.with_own(found, None, shape, spec)
    total = sum(each.read + each.written for each in shape.passes)
    return replace(_frame(shape, spec, found), bytes={"hbm": total})


def _separate(shape: CascadeShape, spec: Device, rates: Rates) -> Estimate:
    """Estimate separate kernels, of a chain behind rows as of the chain alone.

    Else groups of a model with the rows and without them are compared with different libraries.
    """
    if shape.product is None or not shape.product.is_chain:
        return eager_estimate(shape.passes, spec, rates)
    rows = eager_estimate(shape.passes[:1], spec, rates)
    behind = eager(shape_of(shape.product.chain), rates, spec.sms)
    terms = {name: rows.terms.get(name, 0.0) + time for name, time in behind.terms.items()}
    return Estimate({**rows.terms, **terms}, behind.busy)


def _frame(shape: CascadeShape, spec: Device, found: Estimate) -> CascadePlan:
    """Make a plan not to fuse, with the times of an estimate; fused plans replace the rest."""
    terms = plain_numbers(found.terms)
    total = sum(terms.values())
    alone = plain_numbers(found.busy)
    return CascadePlan(shape, spec.name, EAGER, {}, total, terms, found.bound, {}, alone, MEMORY)


def _none_fits(
    shape: CascadeShape, steps: Mapping[str, Sequence[Step]], spec: Device
) -> RefusedError:
    of = " or ".join(each.name for each in cascade_families(shape))
    found = f"a cascade whose family is '{of}'"
    for family, left in steps.items():
        last = next((each for each in left if not each.candidates), None)
        if last is not None:
            found = f"'{last.text}' leaves none of {left[0].candidates} tiles of {family}"
    return _refused(
        shape.name,
        found=found,
        limit=f"tiles for {spec.name}: its shared memory and registers",
        instead="leave `only` out, pass the tiles, or split the cascade",
    )


# Plans restricted to one place of the states, for comparisons of places.


def placed_cascade(
    workload: Any, place: str, target: str | Device | None = None, *, rates: Rates | None = None
) -> list[CascadePlan]:
    """Rank the plans that keep the states of a cascade in one place; at least one, else refused.

    In ``"registers"`` one CTA has a row's whole axis. In ``"dsm"`` clusters share it and merge
    through distributed shared memory, even where rows alone would fill the device. In ``"global"``
    CTAs share it, and a second kernel merges their states.

    Examples
    --------
    >>> best = placed_cascade("R3:batch=1", "global")[0]
    >>> best.place, best.tiles["merge"]
    ('states in global memory', 'kernel')
    """
    spec = device(target)
    shape = workload if isinstance(workload, CascadeShape) else shape_of_cascade(workload)
    known = rates or rates_of(spec)
    families = cascade_families(shape)
    found = [
        _of_kernel(family, each, spec, known)
        for family in families
        for each in family.parted(place, spec, known)
    ]
    named = {each.name: each.state_places[place] for each in families if place in each.state_places}
    if not found and named:
        every = ranked_cascade(shape, spec, only=tuple(named), rates=known)
        found = [each for each in every if each.place.startswith(named[each.family])]
    if found:
        return found
    raise _refused(
        shape.name,
        found=f"placement {place!r}, and no kernel that keeps states there",
        limit=f"{', '.join(STATE_PLACES)} of a stream; the last two where CTAs can share the axis",
        instead="leave the placement out ('auto')",
    )


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
