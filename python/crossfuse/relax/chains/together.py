"""Products of one operand as one kernel, each with a result of its own.

Those for queries, keys and values multiply the same rows. Each is short, so that as kernels of
their own they spend much of their time in starting; in one launch memory has all of them to answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.skinny import FAMILY, SkinnyKernel, behind_another
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, in_order, ranked
from crossfuse.relax.chains.kinds import Chains
from crossfuse.relax.chains.planned import PlannedChain, value_of
from crossfuse.relax.graph import Graph
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.relax.replace import Replacement
from crossfuse.workload.build import emit_products


class Together(Chains):
    """Several products that were planned one by one; they are found by `joined`, not in a graph."""

    name = "together"

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return FAMILY.schedule(func, plan.tiles, plan.device, constant_weights=constant)


@dataclass(frozen=True)
class PlannedTogether(PlannedChain):
    """Products of one operand with the plan of a kernel of all of them."""

    members: tuple[PlannedChain, ...]

    @property
    def outputs(self) -> tuple[Var, ...]:
        """See `PlannedGroup.outputs`."""
        return tuple(each.output for each in self.members)

    @property
    def name(self) -> str:
        """See `PlannedChain.name`."""
        return "crossfuse_gemms"

    def call(self, function: GlobalVar) -> Replacement:
        """The call of the kernel."""
        arguments = self.outlined.arguments
        results = tuple(
            relax.TensorType((each.outlined.M, each.outlined.L), each.outlined.output_dtype)
            for each in self.members
        )
        values = tuple(value_of(each, self.given) for each in arguments)
        shapes = tuple(each.shape for each in arguments)
        return Replacement(function, values, shapes, self.outputs, results)


def joined(
    graph: Graph, found: Sequence[PlannedChain], target: Device
) -> Iterator[PlannedTogether]:
    """Products of one operand among some that were planned, each group with a plan.

    Left out are those for which no tiles divide each product.
    """
    by_operand: dict[Any, list[PlannedChain]] = {}
    for each in found:
        first = each.given[each.outlined.arguments[0].position]
        by_operand.setdefault((first, each.outlined.dtype, each.outlined.M), []).append(each)
    for every in by_operand.values():
        members = tuple(_at_once(graph, every))
        plans = _plans(members, target) if len(members) > 1 else ()
        if plans:
            yield _planned(members, plans)


def _at_once(graph: Graph, every: Sequence[PlannedChain]) -> Iterator[PlannedChain]:
    """Products whose operands are there before the first of them is made, in order."""
    place = {each.var: each.place for each in graph.nodes}
    start = min(place[each.output] for each in every)
    for each in every:
        if all(place.get(one, -1) < start for one in each.given):
            yield each


def _plans(members: Sequence[PlannedChain], target: Device) -> tuple[Plan, ...]:
    """Plans of a product with the columns of all, whose tiles divide each, and not to fuse."""
    shapes = [shape_of(each.plans[0].chain) for each in members if isinstance(each.plans[0], Plan)]
    first = shapes[0]
    wide = matrix_chain(first.m, (first.k, sum(each.n for each in shapes)), item=first.item)
    every = ranked(wide, target, only=(FAMILY.name,), keep=_ALL)
    fit = [
        behind_another(each, target)
        for each in every
        if not any(map(SkinnyKernel.read(each.tiles).broken, shapes))
    ]
    fit.sort(key=lambda each: each.microseconds)
    apart = replace(every[0], family=EAGER, tiles={}, runners=(), kernels=())
    eager = sum(each.eager for each in members)
    apart = replace(apart, microseconds=eager, terms={"kernels": eager}, bound="kernels")
    return tuple(in_order([*fit[:FEW], apart], fused=False)) if fit else ()


#: More than there are tiles.
_ALL = 1000


def _planned(members: tuple[PlannedChain, ...], plans: tuple[Plan, ...]) -> PlannedTogether:
    forms = [each.outlined.form for each in members]
    given = tuple(dict.fromkeys(one for each in members for one in each.given))
    outlined = _outlined(members, given, emit_products([each for each in forms if each]))
    first = members[0]
    summary = " + ".join(f"{each.outlined.L}" for each in members)
    text = f"gemm:M={outlined.M},K={outlined.K},N={summary},dtype={outlined.dtype} of one operand"
    return PlannedTogether(plans, None, first.output, given, text, outlined, Together(), members)


def _outlined(members: Sequence[PlannedChain], given: Sequence[Var], func: Any) -> Outlined:
    """The function of all products; its operand is that of the first one."""
    places = {each: place for place, each in enumerate(given)}

    def moved(member: PlannedChain, argument: Argument, end: str) -> Argument:
        if argument.value is None:
            value = member.given[argument.position]
            argument = replace(argument, position=places[value])
        return replace(argument, name=f"{argument.name}{end}")

    first = members[0]
    operand = moved(first, first.outlined.arguments[0], "")
    others = (
        moved(each, argument, f"_{number}")
        for number, each in enumerate(members)
        for argument in each.outlined.arguments[1:]
    )
    columns = sum(each.outlined.L for each in members)
    return replace(
        first.outlined, func=func, arguments=(operand, *others), N=columns, L=columns, kind="gemms"
    )
