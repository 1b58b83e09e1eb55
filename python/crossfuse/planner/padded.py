"""Plans of chains whose rows TMA does not copy: those of padded copies, and what copies take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crossfuse.hardware import TMA_PITCH, Device
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.choice import plain_numbers
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.families import EAGER

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Part of the memory's rate that copies to padded rows reach: 2.9 TB/s of an H200's 4.8, from what
#: chains on copies took beyond their estimate (7 shapes).
_COPIED = 0.6


def aligned_function(spec: Any) -> Any:
    """The function of a spec on padded operands; None where TMA copies its rows as they are.

    Parameters
    ----------
    spec : WorkloadSpec | ConvChainSpec
        A chain.

    Returns
    -------
    tvm.tirx.PrimFunc | None
        See `crossfuse.workload.aligned.aligned`.
    """
    from crossfuse.workload.spec import WorkloadSpec

    if not isinstance(spec, WorkloadSpec):
        return None
    item = chain_of(spec).tensors[0].item
    if not any(each[-1] * item % TMA_PITCH for each in spec.inputs.values()):
        return None  # and TVM need not be loaded
    from crossfuse.workload.aligned import aligned
    from crossfuse.workload.build import form_of

    return aligned(form_of(spec))


def with_copies(func: Any, plans: list[Plan], target: Device, rates: Rates) -> list[Plan]:
    """Plans of a function of padded inputs, with the time that their copies take.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        See `crossfuse.workload.aligned.aligned`.
    plans : list[Plan]
        Of its chain.
    target : Device
        What they are for.
    rates : Rates
        What it does.

    Returns
    -------
    list[Plan]
        In the same order; not to fuse takes what it takes of rows without padding.
    """
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.markers import unpadded_columns, unpadded_shapes
    from crossfuse.planner.kernels.shape import shape_of_blocks

    blocks = read_chain(ir.Schedule(func))
    shapes = unpadded_shapes(func)
    moved = 0
    for each, short in zip(func.params, shapes, strict=False):
        wide = tuple(map(int, each.ty.shape))
        moved += (math.prod(wide) + math.prod(short)) * blocks.item * (wide[-1] != short[-1])
    # Bits at both edges of the memory's clock, in bytes for each microsecond.
    rate = _COPIED * target.memory_bits * target.memory_mhz / 4
    copies = rates.fitted.eager_kernel + moved / rate if moved else 0.0
    k, n = unpadded_columns(func)
    unpadded = replace(shape_of_blocks(blocks), k=k, n=n)
    apart = eager(unpadded, rates, target.sms)
    return [
        _taking(each, apart.terms)
        if each.family == EAGER
        else _taking(each, {**each.terms, "padding": copies})
        for each in plans
    ]


def _taking(plan: Plan, terms: Mapping[str, Any]) -> Plan:
    """The plan with other terms."""
    plain = plain_numbers(terms)
    return replace(plan, microseconds=sum(plain.values()), terms=plain, runners=())
