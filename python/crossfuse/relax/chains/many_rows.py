"""Products of one operand of more rows, such as queries, keys and values, in one launch.

Alone a library's kernels of such products are as fast as ours. Together they fill the GPU, where
each of few columns leaves most of it idle, and start once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.skinny import ROWS
from crossfuse.planner.families.tiled import GEMM, together_kernels
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, plan_of_kernel
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.chains.products import (
    FewRows,
    PlannedTogether,
    Together,
    against_library,
    find_products,
    joined,
    viewed_rows,
)
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import refused
from crossfuse.schedule.planned import rank_function
from crossfuse.schedule.rules.together import schedule_together, tiles_of

#: Rows at most: of more, each product fills the GPU.
_MOST = 1024


class ManyTogether(Together):
    """Several products of one operand that were planned one by one."""

    name = "many_together"

    def plans_of(self, members: Sequence[PlannedChain], target: Device) -> tuple[Plan, ...]:
        """See `Together`."""
        shapes = [
            shape_of(each.plans[0].chain) for each in members if isinstance(each.plans[0], Plan)
        ]
        found = [
            plan_of_kernel(matrix_chain(of.m, (of.k, of.n), item=of.item), kernel, target)
            for kernel, of in together_kernels(shapes, target)[:FEW]
        ]
        return against_library(found, members)

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return schedule_together(func, tiles=tiles_of(plan.tiles), constant_weights=constant)


class ManyRows(FewRows):
    """A product of more static rows, with the element-wise operators behind it."""

    name = "many_rows"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`; products that share their rows alone."""
        every = tuple(find_products(graph, ROWS + 1, _MOST))
        lefts = [viewed_rows(graph, graph.arguments(each.products[0])[0]) for each in every]
        shared = Counter(lefts)
        yield from (each for each, left in zip(every, lefts, strict=True) if shared[left] > 1)

    def joined(
        self, graph: Graph, found: Sequence[PlannedChain], target: Device
    ) -> Iterator[PlannedTogether]:
        """See `GroupKind`; products of one operand are one launch."""
        return joined(graph, found, target, ManyTogether())

    def ranked(self, func: Any, target: Device) -> Sequence[Plan]:
        """See `GroupKind`; alone none is told to be faster than a library."""
        found = rank_function(func, target, keep=FEW)
        eager = next(each for each in found if each.family == EAGER)
        ours = [each for each in found if each.family == GEMM.name and each.k_major]
        if not ours:
            limit = "16-bit weights stored as [n, k], in tiles of the Hopper pipeline"
            raise refused("main", shape_of(found[0].chain).text, limit, "leave it to a library")
        slowest = max(eager.microseconds, *(each.microseconds for each in ours))
        return [*(replace(each, microseconds=slowest, runners=()) for each in ours), eager]
