"""Single products of few rows by stored weights, which take as long as memory delivers these.

A decoder that makes one token has one row, and each product of it waits for its weight: there is
nothing to fuse but what follows element by element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.choice import runner_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.skinny import FAMILY, ROWS, behind_another
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan
from crossfuse.relax.chains.groups import Group, after_product, views_of_weight
from crossfuse.relax.chains.kinds import Chains
from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.chains.together import PlannedTogether, joined
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import PRODUCT, RESHAPES, refused
from crossfuse.relax.outline import Outlined, outline_product
from crossfuse.relax.scaled_rows import ScaledRows, scaled_rows
from crossfuse.relax.symbols import extents_of, is_symbolic, same_extents
from crossfuse.schedule.planned import rank_function

_MATRIX = 2
#: Rows at most that kernels make themselves: of more, nvcc 13.0 unrolls their loop only twice.
_MADE_ROWS = 8
_INSTEAD = "leave it to a library, which has such kernels"


class FewRows(Chains):
    """A product of few static rows, with the element-wise operators behind it."""

    name = "few_rows"
    #: What it has kernels of, for refusals.
    text: ClassVar[str] = "a single product"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        return find_products(graph)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`."""
        return outline_product(static)

    def apart(self, graph: Graph, group: Group) -> float:
        """See `GroupKind`; products of the same rows share the norm that makes these."""
        rows = viewed_rows(graph, graph.arguments(group.products[0])[0])
        shared = len(tuple(readers_of_rows(graph, rows)))
        return len(group.products) / shared if made_inside(graph, rows) else 0.0

    def joined(
        self, graph: Graph, found: Sequence[PlannedChain], target: Device
    ) -> Iterator[PlannedTogether]:
        """See `GroupKind`; products of one operand are one launch."""
        return joined(graph, found, target)

    def ranked(self, func: Any, target: Device) -> Sequence[Plan]:
        """See `GroupKind`; large tiles for tensor cores are left to a library."""
        found = rank_function(func, target, keep=FEW)
        ours = [behind_another(each, target) for each in found if each.family == FAMILY.name]
        ours.sort(key=lambda each: each.microseconds)
        if not ours:
            shape = shape_of(found[0].chain, k_major=found[0].k_major)
            what = f"{self.text} of {shape.text}, {FAMILY.why_none(shape, target)}"
            raise refused("main", what, f"products of family '{FAMILY.name}'", _INSTEAD)
        eager = next(each for each in found if each.family == EAGER)
        first = replace(ours[0], runners=(runner_of(eager, ours[0]),))
        return [first, *ours[1:], eager]


def find_products(graph: Graph) -> Iterator[Group]:
    """Find products of few static rows by matrices that are stored, in order."""
    for variable in graph.makers:
        if graph.operator(variable) != PRODUCT:
            continue
        left, right = graph.arguments(variable)
        of_weight = tuple(views_of_weight(graph, right))
        if not is_of_few_rows(graph, variable, of_weight):
            continue
        views = frozenset((*of_weight, *made_of_rows(graph, left)))
        inside = {*views, variable}
        before = tuple(each for each in graph.makers if each in inside)
        after = tuple(after_product(graph, variable, before))
        yield Group(((variable,),), before, views, after)


def made_of_rows(graph: Graph, left: Any) -> Iterator[Any]:
    """What kernels do to rows on loading: reshapes, and what scales them by a sum, as a norm does.

    See `crossfuse.relax.scaled_rows`.
    """
    yield from views_of_rows(graph, left)
    scaled = made_inside(graph, viewed_rows(graph, left))
    if scaled is not None:
        yield from scaled.inner


def made_inside(graph: Graph, rows: Any) -> ScaledRows | None:
    """How kernels make rows themselves; None where they do not, or where others read these too.

    None as well of more rows, and where a cast alone reads what rows are made of: it belongs to the
    product before.
    """
    readers = (graph.operator(each) for each in readers_of_rows(graph, rows))
    few = prod(map(int, extents_of(rows)[:-1])) <= _MADE_ROWS
    alone = few and all(each == PRODUCT for each in readers)
    scaled = scaled_rows(graph, rows) if alone else None
    if scaled is None or scaled.source not in graph.makers:
        return scaled
    (first, *others) = graph.readers[scaled.source]
    return scaled if others or not graph.is_exact_cast(first.var) else None


def readers_of_rows(graph: Graph, rows: Any) -> Iterator[Any]:
    """What reads rows, or reshapes of them: nodes' variables, and `None` of the model's results."""
    if rows in graph.results:
        yield None
    for node in graph.readers.get(rows, ()):
        if node.operator in RESHAPES:
            yield from readers_of_rows(graph, node.var)
        else:
            yield node.var


def viewed_rows(graph: Graph, left: Any) -> Any:
    """What the left operand of a product is a reshape of."""
    *_, last = (None, *views_of_rows(graph, left))
    return left if last is None else graph.arguments(last)[0]


def views_of_rows(graph: Graph, value: Any) -> Iterator[Any]:
    """Reshapes of rows, the last one first; one that joins heads to rows is none of these."""
    while graph.operator(value) in RESHAPES:
        source = graph.arguments(value)[0]
        if not same_extents(extents_of(source)[-1:], extents_of(value)[-1:]):
            return
        yield value
        value = source


def is_of_few_rows(graph: Graph, product: Var, views: Collection[Var]) -> bool:
    """Whether a product has few rows, and multiplies them by a matrix that nothing computes.

    `views` are the operators between the matrix and the product.
    """
    left, right = graph.arguments(product)
    try:
        if is_symbolic(left) or is_symbolic(right) or len(extents_of(right)) != _MATRIX:
            return False
        rows = prod(int(each) for each in extents_of(left)[:-1])
    except RefusedError:
        return False
    weight = right
    while weight in views:
        (weight, *_) = graph.arguments(weight)
    return rows <= ROWS and weight not in graph.makers
