"""Gate and up of few rows with what is made of both, such as ``silu(gate) * up``, as one kernel.

In a decoder's feed-forward block two products multiply the same rows, and their results meet
element by element. As kernels of their own they store and load the gate, and each of them spends
some of its time in starting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Var

from crossfuse.hardware import Device
from crossfuse.relax.chains.groups import Group, after_product, views_of_weight
from crossfuse.relax.chains.products import FewRows, is_of_few_rows, made_of_rows, viewed_rows
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import PRODUCT
from crossfuse.relax.outline import Outlined, outline_gated
from crossfuse.relax.symbols import same_extents


class GatedFewRows(FewRows):
    """Two products of few static rows that element-wise operators make one value of."""

    name = "gated_few_rows"
    text = "gate and up"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        return find_gated(graph)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`."""
        return outline_gated(static)

    def joined(self, graph: Graph, found: Sequence[Any], target: Device) -> Iterator[Any]:
        """See `GroupKind`; these are joined already."""
        yield from ()


@dataclass(frozen=True)
class GatedGroup(Group):
    """A layer of two products; what follows them begins with a value that is made of both."""

    #: The first value that both are needed for, of `before`.
    meeting: Var

    @property
    def result(self) -> Var:
        """See `Group.result`."""
        return self.meeting


def find_gated(graph: Graph) -> Iterator[GatedGroup]:
    """Find pairs of products of the same few rows that meet in an element-wise operator, in order.

    What is made of one of them, such as its activation, may have any number of readers in between.
    """
    made_of: dict[Any, frozenset[Var]] = {}
    for value in graph.makers:
        if graph.operator(value) == PRODUCT:
            made_of[value] = frozenset({value})
        elif graph.is_elementwise(value):
            sources = [made_of.get(each, frozenset()) for each in graph.arguments(value)]
            made_of[value] = frozenset().union(*sources)
            meet = len(made_of[value]) == 2 and not any(len(each) == 2 for each in sources)
            if meet and _are_alike(graph, made_of[value]):
                yield _group(graph, value, made_of)


def _are_alike(graph: Graph, products: frozenset[Var]) -> bool:
    """Whether products have the same few rows and extents, and weights that are stored."""
    first, second = products
    lefts = [graph.arguments(each)[0] for each in products]
    if not viewed_rows(graph, lefts[0]).same_as(viewed_rows(graph, lefts[1])):
        return False
    weights = [graph.arguments(each)[1] for each in products]
    shapes = [each.ty.shape.values for each in (first, second)]
    return same_extents(*shapes) and all(
        is_of_few_rows(graph, each, tuple(views_of_weight(graph, right)))
        for each, right in zip(products, weights, strict=True)
    )


def _group(graph: Graph, meeting: Var, made_of: dict[Any, frozenset[Var]]) -> GatedGroup:
    products = tuple(each for each in graph.makers if each in made_of[meeting])
    operands = [graph.arguments(each) for each in products]
    views = frozenset(
        view
        for left, right in operands
        for view in (*made_of_rows(graph, left), *views_of_weight(graph, right))
    )
    reached = graph.reach(meeting, products)[0]
    inside = {*views, *products, *(each for each in reached if made_of.get(each))}
    before = tuple(each for each in graph.makers if each in inside)
    after = tuple(after_product(graph, meeting, before))
    return GatedGroup((products,), before, views, after, meeting)
