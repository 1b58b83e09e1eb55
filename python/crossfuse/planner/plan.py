"""Plans: which kernel computes a chain, with which tiles, and why that one.

`plan` ranks every kernel that the rules can build, and not fusing, by their estimated time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from crossfuse.calls import AtLeastOne, Named, checked
from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import TMA_PITCH, Device, device
from crossfuse.planner.chain.build import chain_of, chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.choice import Plan as Plan
from crossfuse.planner.choice import check_families, plain_numbers, runner_of
from crossfuse.planner.cost.estimate import corrected, eager, fastest
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.registry import FAMILIES, families
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, count, select, shape_of, shape_of_blocks
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.spec import LAYERS

if TYPE_CHECKING:
    from crossfuse.blocks.chain import Chain as BlockChain
    from crossfuse.planner.cascade.plan import CascadePlan

AnyWorkload = Annotated[
    Any,
    Named(
        ("str", "WorkloadSpec", "LayersSpec", "CascadeSpec", "Chain"),
        "the id or text of a workload, its spec, or a chain",
    ),
]


@checked
def plan(
    workload: AnyWorkload,
    target: str | Device | None = None,
    *,
    k_major: bool = True,
    only: Sequence[str] = (),
    rates: Rates | None = None,
) -> Plan | CascadePlan:
    """Choose the kernel with the least estimated time.

    Parameters
    ----------
    workload : str | WorkloadSpec | LayersSpec | CascadeSpec | Chain
        What is computed: a packaged id or the text of a spec, a spec, or a chain. A spec says how
        its weights are stored. Of a spec whose rows TMA does not copy the plan is that of padded
        copies, whose extents it has; ``"padding"`` among its terms is what they take.
    target : str | Device | None
        Device.
    k_major : bool
        Of a chain: whether weights are stored as [n, k].
    only : Sequence[str]
        Families to choose from; all of them, and ``"eager"``, where it is empty.
    rates : Rates | None
        What the device does; None takes its packaged record.

    Returns
    -------
    Plan | CascadePlan
        The best one, with the best of every other family; of a cascade of reductions that of
        `crossfuse.planner.cascade.plan.plan_cascade`.

    Raises
    ------
    PlanRefused
        If no kernel of these families fits, or the chain is none that rules build kernels of.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> plan(lookup("G1")).family
    'registers'
    """
    if is_cascade(workload):
        from crossfuse.planner.cascade.plan import plan_cascade

        return plan_cascade(workload, target, only=only, rates=rates)
    return ranked(workload, target, k_major=k_major, only=only, rates=rates)[0]


def is_cascade(workload: Any) -> bool:
    """Whether a workload is a cascade of reductions: its spec, or a text that names one."""
    from crossfuse.workload.cascade_spec import CascadeSpec
    from crossfuse.workload.cascades import names_one

    if isinstance(workload, str):
        return names_one(workload)
    return isinstance(workload, CascadeSpec)


@checked
def ranked(
    workload: AnyWorkload,
    target: str | Device | None = None,
    *,
    k_major: bool = True,
    only: Sequence[str] = (),
    rates: Rates | None = None,
    keep: AtLeastOne = 1,
    fused: bool = False,
    pipelined: bool = False,
) -> list[Plan]:
    """The best plans of each family, the fastest first.

    Parameters
    ----------
    workload, target, k_major, only, rates
        See `plan`.
    keep : int
        Plans of a family.
    fused : bool
        Whether a kernel of ours is asked for: not to fuse is a runner then, and never the plan.
    pipelined : bool
        Whether a kernel of the Hopper pipeline is asked for: it alone takes fewer rows than it was
        built for, and has a timeline.

    Returns
    -------
    list[Plan]
        At least one; the first has the others' first as `Plan.runners`.

    Raises
    ------
    PlanRefused
        If a family of `only` is not known, or no kernel of the families fits the device.

    Examples
    --------
    >>> sorted(each.family for each in ranked("G4", only=("l2", "dsm", "eager")))
    ['dsm', 'eager', 'l2']
    """
    spec = device(target)
    known = rates or rates_of(spec)
    padded = None if isinstance(workload, Chain) else _padded(workload)
    if padded is not None:
        return plans_of_function(
            padded, spec, only=only, rates=known, keep=keep, fused=fused, pipelined=pipelined
        )
    chain, stored = _read_workload(workload, k_major)
    shape = shape_of(chain, k_major=stored)
    frame = Plan(chain, stored, spec.name, EAGER, {}, 0.0, {}, "", {})
    wanted = tuple(only) or (*(each.name for each in families(shape)), EAGER)
    check_families(wanted, (*FAMILIES, EAGER))
    named = [FAMILIES[each] for each in wanted if each != EAGER]
    ours = [each for each in named if each.pipelined or not pipelined]
    plans = [each for one in ours for each in _of_family(frame, one, shape, spec, known, keep)]
    if EAGER in wanted:
        plans.append(_not_fused(frame, shape, spec, known))
    found = in_order(plans, fused=fused)
    if not found:
        raise _none_fits(named, shape, spec, pipelined)
    return found


def in_order(plans: Sequence[Plan], *, fused: bool) -> list[Plan]:
    """Sort plans of a chain, the fastest first, with the best of each other family as its runners.

    With `fused`, not fusing is a runner at most.
    """
    every = sorted(plans, key=lambda each: each.microseconds)
    first = {each.family: each for each in reversed(every)}
    found = [each for each in every if not fused or each.family != EAGER]
    if not found:
        return []
    best = found[0]
    others = sorted(
        (each for name, each in first.items() if name != best.family),
        key=lambda each: each.microseconds,
    )
    return [replace(best, runners=tuple(runner_of(each, best) for each in others)), *found[1:]]


def _padded(workload: Any) -> Any:
    """Function on padded operands that a spec is compiled as, if it is."""
    return aligned_function(_spec_of(workload))


def _spec_of(workload: Any) -> Any:
    """The spec of a chain; a text that names no kind of chain is held against all kinds."""
    from crossfuse.workload.cascades import resolve_any
    from crossfuse.workload.suites import names_layers, resolve_chain

    if isinstance(workload, str) and not names_layers(workload):
        return resolve_any(workload, (LAYERS,))
    return resolve_chain(workload)


def _read_workload(workload: Any, k_major: bool) -> tuple[Chain, bool]:
    """Read a chain, and whether its weights are stored as [n, k]."""
    if isinstance(workload, Chain):
        return workload, k_major
    spec = _spec_of(workload)
    return chain_of(spec), spec.weights == "nk"


def _none_fits(
    wanted: Sequence[ChainFamily], shape: Shape, spec: Device, pipelined: bool
) -> RefusedError:
    def why(family: ChainFamily) -> str:
        if pipelined and not family.pipelined:
            return f"{family.name} is no family of the Hopper pipeline"
        return family.why_none(shape, spec)

    return refuse(
        PlanRefused,
        "plan",
        f"chain of {shape.text}",
        found="; ".join(map(why, wanted)),
        limit=f"tiles for {spec.name}: its shared memory, registers, and clusters that are "
        "resident",
        instead="leave `only` out, or allow 'eager', which is not to fuse",
    )


def _not_fused(frame: Plan, shape: Shape, spec: Device, rates: Rates) -> Plan:
    found = rates.with_own(eager(shape, rates, spec.sms), None, shape, spec)
    terms = plain_numbers(found.terms)
    return replace(
        frame,
        microseconds=sum(terms.values()),
        terms=terms,
        bound=found.bound,
        bytes=_bytes(frame.chain, {}),
    )


def _of_family(
    frame: Plan, family: ChainFamily, shape: Shape, spec: Device, rates: Rates, keep: int
) -> list[Plan]:
    if not family.matches(shape):
        return []
    candidates = family.every(shape, spec)
    if not count(candidates):
        return []
    order, _ = fastest(candidates, shape, spec, rates, keep)
    return [_of_kernel(frame, select(candidates, int(each)), shape, spec, rates) for each in order]


def plan_of_kernel(chain: Chain, kernel: TileKernel, target: Device) -> Plan:
    """The plan of one kernel of a chain whose weights are stored as [n, k]."""
    frame = Plan(chain, True, target.name, EAGER, {}, 0.0, {}, "", {})
    return _of_kernel(frame, kernel, shape_of(chain), target, rates_of(target))


def _of_kernel(frame: Plan, kernel: TileKernel, shape: Shape, spec: Device, rates: Rates) -> Plan:
    found = corrected(kernel, shape, spec, rates)
    terms = plain_numbers(found.terms)
    return replace(
        frame,
        family=kernel.family,
        tiles=kernel.tiles(),
        microseconds=sum(terms.values()),
        terms=terms,
        bound=found.bound,
        bytes=_bytes(frame.chain, kernel.moved_bytes(shape)),
        kernels=kernel.resources(shape, spec),
    )


def _bytes(chain: Chain, moved: Mapping[str, int]) -> dict[str, int]:
    ends = [each for each in chain.tensors if each.role != "intermediate"]
    hbm = sum(chain.stored_bytes(each.name) for each in ends)
    return {"hbm": hbm, **moved}


# Plans of chains whose rows TMA cannot copy: those of padded copies, and the time of copies.

#: Part of the memory's rate that copies to padded rows reach: 2.9 TB/s of an H200's 4.8, from what
#: chains on copies took beyond their estimate (7 shapes).
_COPIED = 0.6


def aligned_function(spec: Any) -> Any:
    """Function of a chain's spec on padded operands; None where TMA copies its rows as they are."""
    from crossfuse.workload.spec import LayersSpec, WorkloadSpec

    if isinstance(spec, LayersSpec):
        widths = (*spec.widths[:-1], *(spec.widths[-1:] if spec.weights == "kn" else ()))
        item = float_type(spec.dtype).size
    elif isinstance(spec, WorkloadSpec) and spec.combine == "sum":
        widths = tuple(each[-1] for each in spec.inputs.values())
        item = chain_of(spec).tensors[0].item
    else:
        return None
    if not any(width * item % TMA_PITCH for width in widths):
        return None  # and TVM need not be loaded
    from crossfuse.workload.build import aligned, form_of

    return aligned(form_of(spec))


def plans_of_function(
    func: Any, target: Device, *, fused: bool = False, **options: Any
) -> list[Plan]:
    """As `ranked`, of a canonical function; of padded operands with the time of their copies."""
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_layers
    from crossfuse.markers import unpadded_shapes

    read, shapes = read_layers(ir.Schedule(func), makes_rows=True), unpadded_shapes(func)
    rank = partial(ranked, chain_of_blocks(read), target, k_major=read.k_major, **options)
    # What not to fuse takes is of rows without padding, and compared with the copies added.
    found = rank(fused=fused and not shapes)
    if fused and all(each.family == EAGER for each in found):
        # Says which rule leaves no tiles of each family.
        found = rank(fused=True)
    if not shapes:
        return found
    rates = options.get("rates") or rates_of(target)
    return in_order(_with_copies(func, read, found, target, rates), fused=fused)


def _with_copies(
    func: Any, blocks: BlockChain, plans: list[Plan], target: Device, rates: Rates
) -> list[Plan]:
    """Add the time of padding copies to plans of a function of padded inputs, in the same order.

    Not fusing takes what it takes of rows without padding.
    """
    from crossfuse.markers import unpadded_columns, unpadded_shapes

    shapes = unpadded_shapes(func)
    moved = 0
    for each, short in zip(func.params, shapes, strict=False):
        wide = tuple(map(int, each.ty.shape))
        moved += (math.prod(wide) + math.prod(short)) * blocks.item * (wide[-1] != short[-1])
    # Bits at both edges of the memory's clock, in bytes for each microsecond.
    rate = _COPIED * target.memory_bits * target.memory_mhz / 4
    copies = rates.fitted.eager_kernel + moved / rate if moved else 0.0
    unpadded = shape_of_blocks(blocks).with_columns(unpadded_columns(func))
    apart = eager(unpadded, rates, target.sms)
    return [
        _taking(each, apart.terms)
        if each.family == EAGER
        else _taking(each, {**each.terms, "padding": copies})
        for each in plans
    ]


def _taking(plan: Plan, terms: Mapping[str, Any]) -> Plan:
    """Replace the terms of a plan."""
    plain = plain_numbers(terms)
    return replace(plan, microseconds=sum(plain.values()), terms=plain, runners=())
