"""A plan of a chain, or of a cascade, with all reasons for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.cascade.rewrite.work import Pass
from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.cascade.plan import CascadePlan, pass_times, ranked_cascade
from crossfuse.planner.cascade.shape import CascadeShape, RowsProduct
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.chain.spec import refuse_reductions
from crossfuse.planner.choice import Plan, Runner, no_plan, plain_numbers, runner_of
from crossfuse.planner.cost.estimate import alone, best_of, eager, turns_of
from crossfuse.planner.cost.rates import Rates, at, rates_of
from crossfuse.planner.cost.terms import Estimate, added
from crossfuse.planner.explain import tables
from crossfuse.planner.explain.levels import (
    CASCADE_LEVELS,
    LEVELS,
    Level,
    Place,
    Share,
    layout,
    levels,
    places,
    size_text,
)
from crossfuse.planner.explain.picture import picture, times_picture
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import (
    CASCADE_FAMILIES,
    cascade_families,
    families,
    read_kernel,
    read_tiles,
)
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import resident, uses
from crossfuse.planner.kernels.shape import Shape, Step, count, least, shape_of
from crossfuse.schema import parse

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Version of the JSON form.
VERSION = 1


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel beyond `crossfuse.planner.kernels.kernel.Resources`."""

    #: Bytes of a CTA's shared memory by use; they add up to all of it.
    shared: Mapping[str, int]
    #: Launched in all.
    clusters: int
    #: Clusters of this size that the device runs at once, one CTA an SM.
    resident: int
    #: Tiles that the busiest cluster makes, phase by phase.
    waves: tuple[int, ...]
    #: SMs without work.
    idle_sms: int


@dataclass(frozen=True, kw_only=True)
class Reasons(ABC):
    """Why a plan is the plan, as values: what chains and cascades have in common.

    Attributes
    ----------
    plan : Plan | CascadePlan
        What is explained.
    levels : tuple[Level, ...]
        What the plan moves and computes.
    best : tuple[Runner, ...]
        The next best plans of any family, the fastest first, if they were asked for.
    pruned : Mapping[str, tuple[Step, ...]]
        Tiles that each rule leaves, by family.
    provisional : bool
        Whether the device's rates are not all measured.
    """

    plan: Any
    levels: tuple[Level, ...]
    best: tuple[Runner, ...]
    pruned: Mapping[str, tuple[Step, ...]]
    provisional: bool

    #: What is counted at each level, and titles of the tables of `best` and of other plans.
    texts: ClassVar[Mapping[str, str]]
    titles: ClassVar[tuple[str, str]]

    @abstractmethod
    def head(self) -> RenderableType:
        """What was chosen, and its time."""

    @abstractmethod
    def own(self) -> list[RenderableType]:
        """Tables of plans of this kind alone."""

    def to_json(self) -> dict[str, Any]:
        """Convert to a value that `json` can write.

        ``plan`` is what `from_json` of its class reads as text; the other fields by name are lists
        or objects of the fields of what they hold.
        """
        fields = asdict(self)
        fields["plan"] = parse(self.plan.to_json())
        return {"version": VERSION, **fields}

    def render(self) -> list[RenderableType]:
        """As tables of rich, in reading order."""
        plan = self.plan
        levels = tables.levels_table(self.levels, plan.microseconds, self.texts)
        parts = [self.head(), levels, tables.terms_table(plan.terms), *self.own()]
        others = zip(self.titles, (self.best, plan.runners), strict=True)
        parts += [tables.runners_table(title, each) for title, each in others if each]
        return [*parts, tables.pruned_table(self.pruned)]

    def text(self, width: int = 100) -> str:
        """As tables of plain text, of lines with `width` columns at most."""
        return tables.printed(self.render(), width)

    def svg(self) -> str:
        """As a picture: time by level and by term."""
        return times_picture(self.plan, self.levels)


@dataclass(frozen=True, kw_only=True)
class Explanation(Reasons):
    """Why a plan of a chain is the plan; see `Reasons` for what plans of cascades have, too.

    Attributes
    ----------
    places : tuple[Place, ...]
        Where each tensor lives.
    usage : tuple[Usage, ...]
        Of each of its kernels, in the order of `Plan.kernels`; empty for a library's.
    layout : tuple[Share, ...]
        Shares of the CTAs of the first cluster.

    Examples
    --------
    >>> import crossfuse
    >>> print(crossfuse.plan("G1").explain().text().splitlines()[0])
    chain of 2 products, m = 128, k = 32, n = 512, l = 256, on nvidia-h100
    """

    places: tuple[Place, ...]
    usage: tuple[Usage, ...]
    layout: tuple[Share, ...]

    texts: ClassVar = LEVELS
    titles: ClassVar = ("next best plans, of any family", "the best of every other family")

    def head(self) -> RenderableType:
        """The chain, and the kernel that was chosen."""
        return tables.head_of_chain(self)

    def own(self) -> list[RenderableType]:
        """Where tensors live, and what kernels take."""
        return tables.of_chain(self)

    def svg(self) -> str:
        """As a picture: time by level and by term, and the layout of a cluster."""
        return picture(self)


def explain(
    plan: Plan,
    *,
    target: str | Device | None = None,
    rates: Rates | None = None,
    best: Sequence[Plan] = (),
) -> Explanation:
    """Explain a plan of a chain, beside the next `best` ones as `ranked` gives them.

    `target` is the device that it was made for, if its limits were not those of the name in the
    plan. `rates` are those that it was made with; None takes the device's record. A plan whose
    tiles are not those of its family is refused.
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
    _check_whole(plan, kernel.kernels(shape) if kernel else ())
    times = {name: float(each) for name, each in found.items()}
    ctas = max((each.busy for each in plan.kernels), default=1)
    rooms = kernel.memories(shape, spec) if kernel else ()
    return Explanation(
        plan=plan,
        levels=levels(chain, kernel, shape, plan.bytes, times, known, ctas),
        best=tuple(runner_of(each, plan) for each in best),
        pruned={each.name: each.pruned(shape, spec) for each in families(shape)},
        provisional=known.measured.provisional,
        places=places(chain, kernel, shape, rooms, spec),
        usage=_usage(plan, kernel, shape, spec) if kernel else (),
        layout=layout(kernel, shape) if kernel else (),
    )


def _check_whole(plan: Plan, kernels: Sequence[object]) -> None:
    """Refuse a plan, as a file may hold one, whose parts do not belong together."""
    if kernels and len(plan.kernels) != len(kernels):
        raise no_plan(f"{len(plan.kernels)} kernels of family {plan.family}", f"{len(kernels)}")
    needed = ("hbm", "l2", "dsm") if kernels else ("hbm",)
    if missing := [each for each in needed if each not in plan.bytes]:
        raise no_plan(f"bytes without {missing[0]}", ", ".join(needed))


def _usage(plan: Plan, kernel: TileKernel, shape: Shape, spec: Device) -> tuple[Usage, ...]:
    room = int(resident(spec, kernel.cluster))
    launched = kernel.clusters(shape, spec)
    active = max(int(each) for each in launched)
    found = []
    parts = zip(
        plan.kernels, kernel.kernels(shape), kernel.memories(shape, spec), launched, strict=True
    )
    for taken, phases, memory, clusters in parts:
        waves = tuple(int(turns_of(each, least(active, room))) for each in phases)
        shared = uses(phases, memory)
        found.append(Usage(shared, int(clusters), room, waves, spec.sms - taken.busy))
    return tuple(found)


# Why a plan of a cascade was chosen: levels, terms, separate kernels, other places, rules.


@dataclass(frozen=True, kw_only=True)
class CascadeReasons(Reasons):
    """Why a plan of a cascade is the plan."""

    #: The separate kernels if it is not fused, with their microseconds.
    passes: tuple[tuple[Pass, float], ...]

    texts: ClassVar = CASCADE_LEVELS
    titles: ClassVar = ("next best plans", "the best of every other place")

    def to_json(self) -> dict[str, Any]:
        """See `Reasons`; a pass is an object with its time."""
        found = super().to_json()
        return {**found, "passes": [{**each, "microseconds": t} for each, t in found["passes"]]}

    def head(self) -> RenderableType:
        """The kernel that was chosen."""
        return _head(self)

    def own(self) -> list[RenderableType]:
        """What the kernel takes, and separate kernels."""
        taken = _taken(self.plan)
        return [*([] if taken is None else [taken]), _passes(self.passes)]


def explain_plan(
    plan: CascadePlan,
    *,
    target: str | Device | None = None,
    rates: Rates | None = None,
    best: Sequence[CascadePlan] = (),
) -> CascadeReasons:
    """Explain a plan of a cascade, beside the next `best` ones.

    `target` is the device that it was made for, if its limits were not those of the name in the
    plan. `rates` are those that it was made with; None takes the device's record.
    """
    spec = device(target or plan.device)
    known = rates or rates_of(spec)
    shape = plan.shape
    passes = pass_times(shape.passes, spec, known)
    others = sorted((*plan.runners, *_apart(plan, spec, known)), key=lambda each: each.microseconds)
    return CascadeReasons(
        plan=replace(plan, runners=tuple(others)),
        levels=_levels(plan, known, spec.sms),
        best=tuple(runner_of(each, plan) for each in best),
        pruned={each.name: each.candidates(spec)[0] for each in cascade_families(shape)},
        provisional=known.measured.provisional,
        passes=tuple((e, max(t.values())) for e, t in zip(shape.passes, passes, strict=True)),
    )


def _apart(plan: CascadePlan, spec: Device, rates: Rates) -> Iterator[Runner]:
    """What several kernels of ours would take, which are no plan."""
    for way, found in apart(plan.shape, spec, rates):
        terms = plain_numbers(found.terms)
        other = replace(plan, microseconds=sum(terms.values()), terms=terms, tiles={})
        yield replace(runner_of(other, plan), family=way)


def apart(shape: CascadeShape, device: Device, rates: Rates) -> Iterator[tuple[str, Estimate]]:
    """Estimate rows and a chain of products in two kernels, each way with its name.

    The rows by themselves, then the chain; and of one first product rows with it, then the second.
    Ways without kernels are left out, and a cascade without a chain has none.
    """
    product = shape.product
    if product is None or not product.is_chain:
        return
    whole = product.shape
    rows = _of_cascade(CascadeShape(shape.name, product.rows), device, rates)
    chain = _of_chain(whole, device, rates)
    if rows is not None and chain is not None:
        yield f"rows ({rows[0]}), then their chain ({chain[0]})", _sum(rows[1], chain[1])
    if whole.products > 1:
        return  # no kernel makes rows for two products
    first = matrix_chain(whole.m, [whole.k, whole.n], item=whole.item)
    made = RowsProduct(first, product.k_major, product.rows, product.chunk)
    before = _of_cascade(CascadeShape(shape.name, product.rows, (), made), device, rates)
    single = replace(whole, n=whole.l, k=whole.n, l=0)
    after = _of_chain(single, device, rates)
    if before is not None and after is not None:
        yield f"rows with their product ({before[0]}), then the next one", _sum(before[1], after[1])


def _of_cascade(shape: CascadeShape, device: Device, rates: Rates) -> tuple[str, Estimate] | None:
    """Family and estimate of the best kernel of a cascade."""
    for family in cascade_families(shape):
        _, found = family.in_order(device, rates)
        if found:
            return family.name, family.estimate(found[0], device, rates)
    return None


def _of_chain(shape: Shape, device: Device, rates: Rates) -> tuple[str, Estimate] | None:
    """Family and estimate of the best kernel of a chain."""
    every = ((each.name, each.every(shape, device)) for each in families(shape))
    found = [(name, best_of(e, shape, device, rates)) for name, e in every if count(e)]
    return min(found, key=lambda each: float(each[1].microseconds), default=None)


def _sum(one: Estimate, other: Estimate) -> Estimate:
    """The estimate of two kernels, one after the other."""
    return Estimate(added(one.terms, other.terms), added(one.busy, other.busy))


def _levels(plan: CascadePlan, rates: Rates, sms: int) -> tuple[Level, ...]:
    found = []
    amounts = {**_computed(plan), **plan.bytes}
    alone = dict(plan.alone)
    if plan.taken is not None and plan.bytes.get("dsm"):
        busy = min(plan.taken.ctas, sms)
        rate = float(at(rates.measured.dsm_push, plan.taken.cluster))
        alone["dsm"] = plan.bytes["dsm"] / (busy * rate)
    alone.setdefault("shared", alone.get("ingest", 0.0))
    for name in CASCADE_LEVELS:
        if amounts.get(name):
            found.append(Level(name, int(amounts[name]), alone.get(name) or None))
    return tuple(found)


def _computed(plan: CascadePlan) -> dict[str, int]:
    """Operations of products, and instructions beside them."""
    if plan.family == EAGER:
        return {"tensor": sum(each.flops for each in plan.shape.passes)}
    tiles = read_tiles(plan.family, plan.tiles)
    return CASCADE_FAMILIES[plan.family](plan.shape).computed(tiles)


def _head(reasons: CascadeReasons) -> RenderableType:
    from rich.text import Text

    plan = reasons.plan
    chosen = "do not fuse: separate kernels"
    if plan.family != EAGER:
        form = CASCADE_FAMILIES[plan.family].form
        chosen = f"{form}: {tables.tiles_text(plan.tiles)}; {plan.place}"
    lines = [
        chosen,
        f"{plan.microseconds:.2f} us estimated on {plan.device}, bound by {plan.bound}",
    ]
    if reasons.provisional:
        lines.append(tables.PROVISIONAL)
    return Text("\n".join(lines))


def _taken(plan: CascadePlan) -> RenderableType | None:
    found = plan.taken
    if found is None:
        return None
    rows = {
        "CTAs": f"{found.ctas}",
        "CTAs of a cluster": f"{found.cluster}",
        "threads of a CTA": f"{found.threads}",
        "CTAs of an SM": f"{found.side}",
        "waves": f"{found.waves:.2f}",
        "registers of a thread, about": f"{found.registers}",
        "shared memory of a CTA": size_text(found.shared_bytes),
    }
    return tables.table("what the kernel takes", ("", "kernel "), list(rows.items()))


def _passes(passes: Sequence[tuple[Pass, float]]) -> RenderableType:
    rows = [
        (each.name, size_text(each.read), size_text(each.written), f"{time:.2f}")
        for each, time in passes
    ]
    return tables.table(
        "not fused: one kernel after another", ("makes", "reads ", "writes ", "us "), rows
    )


# Planning and explaining in one call, and devices with lowered limits.


def explain_best(
    workload: Any,
    target: str | Device | None = None,
    *,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    top: int = 1,
) -> Explanation | CascadeReasons:
    """Plan a workload and explain the plan, compared with the `top` - 1 plans that come next."""
    from crossfuse.planner.plan import is_cascade, ranked

    if top < 1:
        raise refuse(
            PlanRefused,
            "explain",
            "top",
            found=top,
            limit="1 or more plans",
            instead="ask for 1, which is the chosen plan alone",
        )
    if is_cascade(workload):
        cascades = ranked_cascade(workload, target, only=only, rates=rates, keep=top)
        return explain_plan(cascades[0], target=target, rates=rates, best=cascades[1:top])
    plans = ranked(workload, target, only=only, rates=rates, keep=top)
    return explain(plans[0], target=target, rates=rates, best=plans[1:top])


def limited(target: str | Device | None, *, max_cluster: int = 0, shared_bytes: int = 0) -> Device:
    """Lower the limits of a device; 0 leaves one as it is, more than it has is refused.

    `max_cluster` is CTAs of a cluster, of which up to 8 are portable, `shared_bytes` of a CTA.
    """
    spec = device(target)
    given = {"max_cluster": max_cluster, "max_shared_bytes": shared_bytes}
    for name, value in given.items():
        most = getattr(spec, name)
        if not 0 <= value <= most:
            raise refuse(
                PlanRefused,
                "budget",
                name,
                found=value,
                limit=f"1 to {most}, what {spec.name} has, or 0 to take that",
                instead="ask for less, or leave the limit out",
            )
    return replace(
        spec,
        max_cluster=max_cluster or spec.max_cluster,
        max_shared_bytes=shared_bytes or spec.max_shared_bytes,
    )
