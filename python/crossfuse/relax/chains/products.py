"""Single products of few rows by stored weights, which take as long as memory delivers these.

A decoder that makes one token has one row, and each product of it waits for its weight: there is
nothing to fuse but what follows element by element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from tvm import relax
from tvm.ir import GlobalVar, Var

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.choice import runner_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.skinny import FAMILY, ROWS, SkinnyKernel, behind_another
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, in_order, ranked
from crossfuse.relax.chains.groups import Group, after_product, views_of_weight
from crossfuse.relax.chains.kinds import Chains
from crossfuse.relax.chains.planned import PlannedChain, value_of
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import PRODUCT, RESHAPES, refused
from crossfuse.relax.outline import Argument, Outlined, outline_gated, outline_product
from crossfuse.relax.replace import Replacement
from crossfuse.relax.scaled_rows import ScaledRows, scaled_rows
from crossfuse.relax.symbols import extents_of, is_symbolic, same_extents
from crossfuse.schedule.planned import rank_function
from crossfuse.workload.build import emit_products

# Products of one operand as one kernel, each with a result of its own.
#
# Those for queries, keys and values multiply the same rows. Each is short, so that as kernels of
# their own they spend much of their time in starting; in one launch memory has all of them to
# answer.


class Together(Chains):
    """Several products that were planned one by one; they are found by `joined`, not in a graph."""

    name = "together"

    def plans_of(self, members: Sequence[PlannedChain], target: Device) -> tuple[Plan, ...]:
        """Plans of one kernel of several products, and not to fuse; none if there is no kernel."""
        return _plans(members, target)

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
    graph: Graph, found: Sequence[PlannedChain], target: Device, kind: Together
) -> Iterator[PlannedTogether]:
    """Products of one operand among some that were planned, each group with a plan of a kind.

    Left out are those for which no tiles divide each product.
    """
    by_operand: dict[Any, list[PlannedChain]] = {}
    for each in found:
        first = each.given[each.outlined.arguments[0].position]
        by_operand.setdefault((first, each.outlined.dtype, each.outlined.M), []).append(each)
    known: dict[Any, tuple[Plan, ...]] = {}
    for every in by_operand.values():
        members = tuple(_at_once(graph, every))
        if len(members) > 1:
            alike = tuple((id(each.plans), each.apart) for each in members)  # of equal layers
            plans = known[alike] if alike in known else kind.plans_of(members, target)
            known[alike] = plans
            if plans:
                yield _planned(members, plans, kind)


def _at_once(graph: Graph, every: Sequence[PlannedChain]) -> Iterator[PlannedChain]:
    """Products whose operands are there before the first of them is made, in order."""
    makers = graph.makers
    start = min(makers[each.output].place for each in every)
    for each in every:
        if all(one not in makers or makers[one].place < start for one in each.given):
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
    return against_library(fit[:FEW], members)


def against_library(plans: Sequence[Plan], members: Sequence[PlannedChain]) -> tuple[Plan, ...]:
    """Plans of several products in order, with that of a library's kernel for each; or none."""
    if not plans:
        return ()
    apart = replace(plans[0], family=EAGER, tiles={}, runners=(), kernels=())
    eager = sum(each.eager for each in members)
    apart = replace(apart, microseconds=eager, terms={"kernels": eager}, bound="kernels")
    return tuple(in_order([*plans, apart], fused=False))


#: More than there are tiles.
_ALL = 1000


def _planned(
    members: tuple[PlannedChain, ...], plans: tuple[Plan, ...], kind: Together
) -> PlannedTogether:
    forms = [each.outlined.form for each in members]
    given = tuple(dict.fromkeys(one for each in members for one in each.given))
    outlined = _outlined(members, given, emit_products([each for each in forms if each]))
    first = members[0]
    summary = " + ".join(f"{each.outlined.L}" for each in members)
    text = f"gemm:M={outlined.M},K={outlined.K},N={summary},dtype={outlined.dtype} of one operand"
    return PlannedTogether(plans, None, first.output, given, text, outlined, kind, members)


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


_MATRIX = 2
#: Rows at most that kernels make themselves.
_MADE_ROWS = 16
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
        return joined(graph, found, target, Together())

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


def find_products(graph: Graph, fewest: int = 1, most: int = ROWS) -> Iterator[Group]:
    """Find products of few static rows by matrices that are stored, in order."""
    for variable in graph.makers:
        if graph.operator(variable) != PRODUCT:
            continue
        left, right = graph.arguments(variable)
        of_weight = tuple(views_of_weight(graph, right))
        if not fewest <= rows_by_weight(graph, variable, of_weight) <= most:
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
    """Reshapes and exact casts of rows, the last one first; kernels do them on loading.

    A reshape that joins heads to rows is none of these. Rows and weights that are cast to float32
    for a product, as routers have them, are multiplied as they are: kernels add in float32.
    """
    while graph.operator(value) in RESHAPES or graph.is_exact_cast(value):
        source = graph.arguments(value)[0]
        if not same_extents(extents_of(source)[-1:], extents_of(value)[-1:]):
            return
        yield value
        value = source


def rows_by_weight(graph: Graph, product: Var, views: Collection[Var]) -> int:
    """Static rows that a product multiplies by a matrix that nothing computes; 0 of others.

    `views` are the operators between the matrix and the product.
    """
    left, right = graph.arguments(product)
    try:
        if is_symbolic(left) or is_symbolic(right) or len(extents_of(right)) != _MATRIX:
            return 0
        rows = prod(int(each) for each in extents_of(left)[:-1])
    except RefusedError:
        return 0
    weight = right
    while weight in views:
        (weight, *_) = graph.arguments(weight)
    return rows if weight not in graph.makers else 0


# Gate and up of few rows with what is made of both, such as ``silu(gate) * up``, as one kernel.
#
# In a decoder's feed-forward block two products multiply the same rows, and their results meet
# element by element. As kernels of their own they store and load the gate, and each of them spends
# some of its time in starting.


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
        1 <= rows_by_weight(graph, each, tuple(views_of_weight(graph, right))) <= ROWS
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
