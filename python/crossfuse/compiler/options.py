"""Options to schedule a source, the best one first: of chains, of cascades, and as recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.source import Source
from crossfuse.errors import (
    ArtefactRefused,
    CascadeRefused,
    PlanRefused,
    RefusedError,
    ScheduleRefused,
    refuse,
)
from crossfuse.hardware import Device, tvm_target
from crossfuse.measure.choice import FEW
from crossfuse.planner.choice import not_fusing, noted
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.registry import (
    CASCADE_FAMILIES,
    FAMILIES,
    families,
    family_times,
)
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.schedule.planned import only_site, read_note, schedule_cascade
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


@dataclass(frozen=True)
class Option:
    """A way to schedule a function, with the plan that it follows."""

    #: Makes the schedule, or refuses.
    make: Callable[[], Any]
    #: None where a rule chooses the tiles, or the caller scheduled the function.
    plan: Plan | CascadePlan | None = None
    #: Plain values for the library's metadata: what was planned, or why nothing was.
    why: Mapping[str, Any] = field(default_factory=dict)


# Of chains for the Hopper pipeline: kernels that follow plans, the fastest estimate first, or those
# of rules, by where the intermediate lives.


def planned_options(
    source: Source, plan: Plan | None, constant: bool, target: Device, *, pipelined: bool = False
) -> list[Option]:
    """Options to schedule a source by plan, the best one first.

    `plan` None plans the function. The plan not to fuse is then left out, since a kernel of ours is
    asked for, but its estimate is noted. `constant` says that no kernel which may still be running
    writes the weights, `pipelined` that kernels have to be those of the Hopper pipeline. If rules
    build no kernels of such a function, or none fits, `PlanRefused` is raised.
    """
    from crossfuse.schedule.planned import schedule_planned

    return _following(
        [plan] if plan is not None else _plans(source, target, pipelined),
        lambda each: schedule_planned(source.func, each, constant_weights=constant),
    )


def _following(
    plans: Sequence[Plan] | Sequence[CascadePlan], make: Callable[[Any], Any]
) -> list[Option]:
    """Options that follow plans, in their order, which `make` schedules."""
    eager = not_fusing(plans)

    def why(plan: Plan | CascadePlan) -> dict[str, Any]:
        tiles = {plan.family: dict(plan.tiles)} if plan.family in CASCADE_FAMILIES else {}
        return {**tiles, "plan": noted(plan, eager)}

    return [Option(partial(make, each), each, why(each)) for each in plans]


def _plans(source: Source, target: Device, pipelined: bool) -> list[Plan]:
    from crossfuse.planner.chain.build import chain_of
    from crossfuse.planner.plan import ranked
    from crossfuse.schedule.planned import rank_function

    if source.spec is None:
        return rank_function(source.func, target, keep=FEW, fused=True, pipelined=pipelined)
    # Of the extents as they are: padded operands are a source of their own.
    chain, k_major = chain_of(source.spec), source.spec.weights == "nk"
    return ranked(chain, target, k_major=k_major, keep=FEW, fused=True, pipelined=pipelined)


#: Names of placements that `compile` takes; for chains of one length each is of one family.
PLACEMENTS = ("auto", *dict.fromkeys(p for each in FAMILIES.values() for p in each.placements))


def tensor_options(
    source: Source,
    placement: str,
    target: Device,
    *,
    plan: Plan | None = None,
    cluster: int = 0,
    constant: bool = False,
    pipelined: bool = True,
) -> list[Option]:
    """Options to schedule a source for the Hopper pipeline, the best one first; at least one.

    `placement` is one of `PLACEMENTS`; ``"auto"`` leaves place and tiles to the planner, or to
    `plan`, see `planned_options`. A `cluster` of 0 leaves its size open. `constant` says that no
    kernel which may still be running writes the weights. Plans of kernels that are not `pipelined`,
    of few rows, are among the others where that is False.
    """
    if placement != "auto":
        return placed_options(source.func, (placement,), target, cluster, constant)
    if plan is not None:
        return planned_options(source, plan, constant, target, pipelined=pipelined)
    if cluster:
        # The planner's tiles are those of clusters that it chooses itself.
        reason = f"clusters of {cluster} CTAs were asked for"
    else:
        try:
            return planned_options(source, None, constant, target, pipelined=pipelined)
        except PlanRefused as error:
            reason = str(error)
    places = _places(source.func, target)
    return placed_options(source.func, places, target, cluster, constant, reason)


def placed_options(
    func: Any,
    places: tuple[str, ...],
    target: Device,
    cluster: int = 0,
    constant: bool = False,
    reason: str = "",
) -> list[Option]:
    """Kernels with the rules' own tiles, one option for each place of the intermediate.

    The function is canonical; places are of `PLACEMENTS` but ``"auto"``, and of no effect on a
    single product, which has no intermediate. `reason` says why nothing was planned; it is empty
    where the caller names the place.
    """
    shape = _shape(func)
    why = {"not_planned": reason} if reason else {}

    def option(family: ChainFamily) -> Option:
        tiles = family.open_tiles(cluster)
        make = partial(family.schedule, func, tiles, target, constant_weights=constant)
        return Option(make, why=why)

    if len(shape.layers) == 1:
        return [option(each) for each in families(shape) if each.pipelined]
    return [option(_family_of(each, shape)) for each in places]


def _places(func: Any, target: Device) -> tuple[str, ...]:
    """Places of an intermediate, first the one whose fastest tiles are estimated to be the fastest.

    The tiles are the rules' own: only the order of places is taken from the planner's answer.
    """
    shape = _shape(func)
    # Of operands that no kernel multiplies one says why.
    every = (each for each in families(shape) if shape.multiplies or each.fits_all)
    known = [each for each in every if each.placements]
    times = family_times(shape, target, known)
    others = (each.name for each in sorted(known, key=lambda each: not each.fits_all))
    names = dict.fromkeys((*(name for name, _ in times), *others))
    return tuple(next(iter(FAMILIES[each].placements)) for each in names)


def _family_of(place: str, shape: Shape) -> ChainFamily:
    """The family that a placement is of; of other chains, which its rule refuses, if of none."""
    known = [each for each in FAMILIES.values() if place in each.placements]
    return next((each for each in known if each.matches(shape)), known[0])


def _shape(func: Any) -> Shape:
    """What a function's products multiply."""
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_layers

    return shape_of_blocks(read_layers(ir.Schedule(func)))


# Of cascades of reductions.


def is_cascade(source: Source) -> bool:
    """Whether a source is compiled as a cascade: its spec says so, or its function holds no chain.

    A function that is neither cascade nor chain raises `ScheduleRefused`, saying what each lacks.
    """
    if source.cascade is not None:
        return True
    if source.func is None or source.spec is not None or source.outlined is not None:
        return False
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_layers

    try:
        read_layers(ir.Schedule(source.func))
    except RefusedError as error:
        _check_reductions(source, error)
        return True
    return False


def _check_reductions(source: Source, no_chain: RefusedError) -> None:
    """Refuse a function that holds no cascade either, given why it is no chain."""
    from crossfuse.cascade.rewrite.rows_first import sites_of

    try:
        missing = "" if sites_of(source.func) else "no reduction"
    except RefusedError as error:
        missing = f"{error.refusal.where}: {error.refusal.found}"
    if not missing:
        return
    chain = f"{no_chain.refusal.where}: {no_chain.refusal.found}"
    raise refuse(
        ScheduleRefused,
        "compile",
        source.summary,
        found=f"neither a cascade of reductions ({missing}) nor a chain of products ({chain})",
        limit="reductions over one axis, or one or two products with elementwise blocks",
        instead="split the function into such parts, or write the schedule with the primitives",
    )


def cascade_options(
    source: Source,
    target: Device,
    plan: CascadePlan | None = None,
    constant: bool = False,
    placement: str = "auto",
) -> list[Option]:
    """Options to schedule a cascade, the fastest estimate first; at least one.

    `plan` None plans the source. The plan not to fuse is then left out, since a kernel of ours is
    asked for, but its estimate is noted. `constant` says that no kernel which may still be running
    writes the weights of a product. `placement` is where states live, see
    `crossfuse.planner.cascade.plan.placed_cascade`; ``"auto"`` leaves it to the planner. No
    cascade, several, or one that cannot stream raises `CascadeRefused`; tiles that do not fit,
    `PlanRefused`.
    """
    from crossfuse.planner.cascade.plan import ranked_cascade
    from crossfuse.planner.cascade.shape import CascadeShape, rows_product_of
    from crossfuse.planner.families.rows import RowsTiles
    from crossfuse.schedule.rules.rows import rows_before_product

    try:
        return _one_cascade(source, target, plan, constant, placement)
    except (CascadeRefused, PlanRefused):
        # What is no stream as a whole may be rows and a product.
        free = plan is None and placement == "auto"
        product = rows_product_of(source.func) if free else None
        if product is None:
            raise
    shape = CascadeShape(source.summary, product.rows, (), product)
    return _following(
        ranked_cascade(shape, target, only=(ROWS,)),
        lambda each: rows_before_product(source.func, RowsTiles(**each.tiles), constant),
    )


def _one_cascade(
    source: Source, target: Device, plan: CascadePlan | None, constant: bool, placement: str
) -> list[Option]:
    """Options to schedule the whole function as one cascade."""
    from crossfuse import _tvm as ir
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.spec import check_extremes
    from crossfuse.planner.cascade.plan import placed_cascade, ranked_cascade
    from crossfuse.planner.cascade.shape import cascade_shape

    # Importers count in 64 bits, and kernels in 32.
    site = only_site(ir.narrow(source.func))
    derivation = derive(site.cascade)
    check_extremes(derivation)
    every = [plan] if plan is not None else []
    if plan is None:
        shape = cascade_shape(site, derivation, source.summary)
        every = (
            ranked_cascade(shape, target, fused=True)
            if placement == "auto"
            else placed_cascade(shape, placement, target)
        )
    return _following(
        every,
        lambda each: schedule_cascade(
            site, derivation, each.family, each.tiles, constant_weights=constant
        ),
    )


# The option that replays the fastest kernel of a tuning session.

#: Seconds from which on a record is one of a kernel that failed: MetaSchedule stores 1e10.
_FAILED = 1e6


def recorded_options(
    source: Source, work_dir: str | Path, target: Device, constant: bool = False
) -> list[Option]:
    """The fastest kernel of a source in the database of a tuning session, as the only option.

    A trace of a chain is replayed on its function; a cascade is written as the stream that was
    measured, which its record names. `constant` says that no kernel which may still be running
    writes a cascade's weights; traces of chains say it themselves. A folder without a database, or
    without a valid time of this function, raises `ArtefactRefused`.
    """
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    from crossfuse.schedule.planned import note, read_database

    if source.func is None:
        raise _refused(source, work_dir, "a schedule, which has no choices left")
    database = read_database(work_dir)
    module = _normalize_mod(source.func)
    record = database.query_tuning_record(module, tvm_target(target), "main")
    seconds = [] if record is None else [float(each) for each in record.run_secs]
    if not seconds or min(seconds) >= _FAILED:
        raise _refused(source, work_dir, "no kernel of it that was right")
    said = _said(source, work_dir, note(record.trace))
    why = {"recorded": {**said, "microseconds": min(seconds) * 1e6, "database": str(work_dir)}}
    if said.get("family") in CASCADE_FAMILIES:
        from crossfuse.schedule.planned import schedule_cascade_of

        make = partial(
            schedule_cascade_of,
            source.func,
            said["family"],
            said["tiles"],
            constant_weights=constant,
        )
    else:
        make = partial(_replayed, source.func, record.trace)
    return [Option(make, why=why)]


def _said(source: Source, work_dir: str | Path, text: str | None) -> dict[str, Any]:
    """Contents of a trace's note; empty if it has none."""
    try:
        return {} if text is None else asdict(read_note(text))
    except Damaged as error:
        raise _refused(source, work_dir, f"a note that is none ({error})") from None


def _replayed(func: Any, trace: Any) -> Any:
    from crossfuse import _tvm as ir

    schedule = ir.Schedule(func)
    trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule


def _refused(source: Source, work_dir: str | Path, found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "database",
        str(work_dir),
        found=f"{found}: {source.summary}",
        limit="a record with a time, of this workload and target",
        instead="tune it there (crossfuse tune --work-dir), or leave the database out",
    )
