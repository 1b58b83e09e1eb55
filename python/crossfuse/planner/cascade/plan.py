"""Plans of cascades: which kernel computes one, in which tiles, and whether to fuse at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.tiled.sizes import DSM, KERNEL, WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import WARP, WARPGROUP, Device, device
from crossfuse.planner.cascade.choice import CascadeChoice, Taken, eager_estimate
from crossfuse.planner.cascade.kernel import Tiles
from crossfuse.planner.cascade.rows_space import RowsTiles, rows_memory
from crossfuse.planner.cascade.shape import CascadeShape, shape_of_cascade
from crossfuse.planner.cascade.space import estimate, in_order, moved, parted, tile_fields
from crossfuse.planner.cascade.stream_space import ctas, registers, shared_bytes
from crossfuse.planner.cascade.tile_space import at_once, shared_size, steps_of, sum_registers
from crossfuse.planner.choice import Runner, check_families, plain_numbers, runner_of
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families import EAGER, ROWS, STREAM, TILES
from crossfuse.planner.families.registry import CASCADE_FAMILIES, STATE_PLACES
from crossfuse.planner.space.count import Step

if TYPE_CHECKING:
    from crossfuse.planner.explain.cascade import CascadeReasons

# Where a kernel stores what outlives a sweep or a CTA, and the resources it takes.

#: Places of elements that outputs need again, by `StreamTiles.resident`.
_RESIDENT = {"registers": "registers", "shared": "shared memory", "none": "L2"}


def place_of(shape: CascadeShape, tiles: Tiles) -> str:
    """Describe where states and elements are stored, in words that tell kinds of kernels apart.

    States of a CTA are in registers, those of a cluster go through DSM, those that a second kernel
    merges through global memory. Elements that outputs over the axis need again are in registers or
    shared memory, or come from L2 as far as it has them.
    """
    if isinstance(tiles, RowsTiles):
        return "chunks of rows in L2" if tiles.chunk else "rows in L2"
    state = "DSM" if tiles.cluster > 1 else "registers"
    if isinstance(tiles, CascadeTiles) and tiles.in_memory:
        state = "global memory"
    if isinstance(tiles, StreamTiles) and isinstance(shape.work, Work) and shape.work.outputs:
        return f"states in {state}, elements in {_RESIDENT[tiles.resident]}"
    return f"states in {state}"


def taken(shape: CascadeShape, tiles: Tiles, device: Device) -> Taken:
    """Resources of the device that a kernel takes."""
    if isinstance(tiles, RowsTiles):
        return _taken_by_rows(shape, tiles, device)
    size = tiles.cluster
    if isinstance(tiles, StreamTiles):
        assert isinstance(shape.work, Work)
        groups, side = -(-shape.work.rows // tiles.rows), ctas(shape.work, tiles, device)
        room = side * device.resident_clusters(size)
        threads = max(WARP, tiles.threads * tiles.rows)
        return Taken(
            groups * size,
            size,
            threads,
            side,
            registers(shape.work, tiles),
            shared_bytes(shape.work, tiles),
            round(max(1.0, groups / room), 2),
        )
    assert not isinstance(shape.work, Work)
    found = steps_of(shape.work, tiles)
    return Taken(
        found.places * size,
        tiles.ctas_of_cluster,
        # One warpgroup more loads.
        WARPGROUP * (found.sizes.rows // WARPGROUP_ROWS + 1),
        1,
        sum_registers(shape.work, found.sizes),
        shared_size(shape.work, found.sizes),
        round(max(1.0, found.places * tiles.alone / at_once(tiles, device)), 2),
    )


def _taken_by_rows(shape: CascadeShape, tiles: RowsTiles, device: Device) -> Taken:
    """Resources of the product's kernel; the warps that make rows are part of it anyway."""
    assert shape.product is not None
    (found,) = tiles.kernel.resources(shape.product.shape, device)
    (phase,) = tiles.kernel.phases(shape.product.shape)
    waves = int(phase.tiles) * found.cluster / found.busy
    return Taken(
        found.ctas,
        found.cluster,
        found.threads,
        1,
        found.sums,
        int(rows_memory(shape.product, tiles.kernel, device).size),
        round(max(1.0, waves), 2),
    )


#: Plans of rows before a product at most: the best one lowers, or one of the next.
_ROWS_PLANS = 8
#: Words of the place of separate kernels, and of states that the CTAs of a cluster merge.
MEMORY, IN_DSM = "memory", "states in DSM"


@dataclass(frozen=True)
class CascadePlan(CascadeChoice):
    """How a cascade is computed; see `crossfuse.planner.cascade.choice.CascadeChoice`."""

    def explain(self, target: str | Device | None = None) -> CascadeReasons:
        """Say why this is the plan: see `crossfuse.planner.explain.cascade.explain_plan`."""
        from crossfuse.planner.explain.cascade import explain_plan

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
    for family in (each for each in shape.families if each in wanted):
        steps[family], order = in_order(shape, spec, known, family)
        most = min(keep or _ROWS_PLANS, _ROWS_PLANS) if family == ROWS else len(order)
        ranks.append([_of_kernel(shape, family, each, spec, known) for each in order[:most]])
    # Each family keeps its order.
    plans = list(merge(*ranks, key=lambda each: each.microseconds))
    eager = [_of_passes(shape, spec, known)] if EAGER in wanted else []
    if not plans and (fused or not eager):
        raise _none_fits(shape, steps, spec)
    stored = []
    if any(each.family == TILES and each.place == IN_DSM for each in plans):
        stored = parted_plans(shape, spec, known, KERNEL)[:1]
    runners = _runners([*plans, *eager, *stored], fused)
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


def parted_plans(shape: CascadeShape, spec: Device, rates: Rates, merge: str) -> list[CascadePlan]:
    """Rank the plans of tiles whose axis several CTAs share; `merge` as `CascadeTiles.merge`."""
    found = parted(shape, spec, rates, merge)
    return [_of_kernel(shape, TILES, each, spec, rates) for each in found]


def tried(plans: Sequence[CascadePlan]) -> list[CascadePlan]:
    """Select the plans that are worth lowering one after another.

    Of streams all: what the planner expects to fit does. Of tiles, whose expressions may need more
    registers than estimated, only those that need fewer registers than all before them of the same
    cluster size.
    """
    least: dict[tuple[int, int], int] = {}
    found = []
    for each in plans:
        if each.taken is not None and each.family == TILES:
            size = each.taken.cluster, int(each.tiles["cluster"])
            needed = each.taken.registers
            if needed >= least.get(size, needed + 1):
                continue
            least[size] = needed
        found.append(each)
    return found


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


def _of_kernel(
    shape: CascadeShape, family: str, tiles: Tiles, spec: Device, rates: Rates
) -> CascadePlan:
    found = estimate(shape, tiles, spec, rates)
    frame = _frame(shape, spec, found)
    return replace(
        frame,
        family=family,
        tiles=tile_fields(tiles),
        bytes=moved(shape, tiles, spec),
        place=place_of(shape, tiles),
        taken=taken(shape, tiles, spec),
    )


def _of_passes(shape: CascadeShape, spec: Device, rates: Rates) -> CascadePlan:
    found = eager_estimate(shape.passes, spec, rates)
    found = with_own(found, rates.own, None, shape, spec)
    total = sum(each.read + each.written for each in shape.passes)
    return replace(_frame(shape, spec, found), bytes={"hbm": total})


def _frame(shape: CascadeShape, spec: Device, found: Estimate) -> CascadePlan:
    """Make a plan not to fuse, with the times of an estimate; fused plans replace the rest."""
    terms = plain_numbers(found.terms)
    total = sum(terms.values())
    alone = plain_numbers(found.busy)
    return CascadePlan(shape, spec.name, EAGER, {}, total, terms, found.bound, {}, alone, MEMORY)


def _none_fits(
    shape: CascadeShape, steps: Mapping[str, Sequence[Step]], spec: Device
) -> RefusedError:
    found = f"a cascade whose family is '{' or '.join(shape.families)}'"
    for family, left in steps.items():
        last = next((each for each in left if not each.candidates), None)
        if last is not None:
            found = f"'{last.text}' leaves none of {left[0].candidates} tiles of {family}"
    return refuse(
        PlanRefused,
        "plan",
        shape.name,
        found=found,
        limit=f"tiles for {spec.name}: its shared memory and registers",
        instead="leave `only` out, pass the tiles, or split the cascade",
    )


# Plans restricted to one place of the states, for comparisons of places.

#: Where states merge in each of `STATE_PLACES`; None without merging.
_MERGES: dict[str, str | None] = dict(zip(STATE_PLACES, (None, DSM, KERNEL), strict=True))


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
