"""Where the intermediate of a chain lives in kernels of the Hopper pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.errors import PlanRefused
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.choice import not_fusing, noted
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.registry import FAMILIES, families
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.planner.nearest import family_times

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

# Options from the planner: kernels that follow plans, the fastest estimate first.


def planned_options(
    source: Source, plan: Plan | None, constant: bool, target: Device
) -> list[Option]:
    """Options to schedule a source by plan, the best one first.

    `plan` None plans the function. The plan not to fuse is then left out, since a kernel of ours is
    asked for, but its estimate is noted. `constant` says that no kernel which may still be running
    writes the weights. If rules build no kernels of such a function, or none fits, `PlanRefused` is
    raised.
    """
    from crossfuse.schedule.planned import schedule_planned

    plans = [plan] if plan is not None else _plans(source, target)
    eager = not_fusing(plans)
    return [
        Option(
            partial(schedule_planned, source.func, each, constant_weights=constant),
            each,
            {"plan": noted(each, eager)},
        )
        for each in plans
    ]


def _plans(source: Source, target: Device) -> list[Plan]:
    from crossfuse.planner.chain.build import chain_of
    from crossfuse.planner.plan import ranked
    from crossfuse.schedule.planned import rank_function

    if source.spec is None:
        return rank_function(source.func, target, keep=FEW, fused=True)
    # Of the extents as they are: padded operands are a source of their own.
    chain, k_major = chain_of(source.spec), source.spec.weights == "nk"
    return ranked(chain, target, k_major=k_major, keep=FEW, fused=True)


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
) -> list[Option]:
    """Options to schedule a source for the Hopper pipeline, the best one first; at least one.

    `placement` is one of `PLACEMENTS`; ``"auto"`` leaves place and tiles to the planner, or to
    `plan`, see `planned_options`. A `cluster` of 0 leaves its size open. `constant` says that no
    kernel which may still be running writes the weights.
    """
    if placement != "auto":
        return placed_options(source.func, (placement,), target, cluster, constant)
    if plan is not None:
        return planned_options(source, plan, constant, target)
    if cluster:
        # The planner's tiles are those of clusters that it chooses itself.
        reason = f"clusters of {cluster} CTAs were asked for"
    else:
        try:
            return planned_options(source, None, constant, target)
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
    placed: list[tuple[ChainFamily, Mapping[str, Any]]] = [
        (family, family.placements[each].options)
        for each in places
        for family in [_family_of(each, shape)]
    ]
    if len(shape.layers) == 1:
        placed = [(each, {}) for each in families(shape)]
    return [
        Option(
            partial(
                family.schedule,
                func,
                family.open_tiles(cluster),
                target,
                constant_weights=constant,
                options=options,
            ),
            why={"not_planned": reason} if reason else {},
        )
        for family, options in placed
    ]


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
