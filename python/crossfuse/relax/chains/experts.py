"""Products of tokens by the weights of the experts that a router chose, in few tokens.

Written without a kernel of its own, each pair of a token and an expert copies this expert's
weights, and multiplies the copy: three times the traffic of reading them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.experts import best_kernels
from crossfuse.planner.plan import Plan, in_order, plan_of_kernel
from crossfuse.relax.chains.groups import Group, after_product
from crossfuse.relax.chains.kinds import Chains
from crossfuse.relax.chains.products import GatedGroup
from crossfuse.relax.elementwise import Leaf, read_region
from crossfuse.relax.graph import Graph, clean, read_graph
from crossfuse.relax.operators import CAST, PRODUCT, RESHAPES, dtype_of, refused, scalar, shape_of
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.relax.symbols import is_symbolic
from crossfuse.schedule.rules.experts import read_experts, schedule_experts
from crossfuse.schedule.rules.skinny import SkinnyTiles
from crossfuse.workload.dtypes import FLOAT_TYPES, Operand, loses
from crossfuse.workload.experts import ExpertProduct, ExpertsForm, emit_experts

_TAKE, _SLICE, _SUM, _TIMES = (
    f"relax.{name}" for name in ("take", "strided_slice", "sum", "multiply")
)
_RANK, _MATRIX = 3, 2
#: How often the graph's own kernels pass the chosen weights: read, written, and read again; and
#: their number, beside that of what follows.
_PASSES, _KERNELS = 3, 3


@dataclass(frozen=True)
class Match:
    """The parts of products by chosen weights."""

    product: Var
    #: Pairs of a token and an expert.
    pairs: int
    #: Weights of all experts, and the expert of each pair: the first ones of each row.
    weight: Any
    places: Any
    #: Whether places beyond the experts are those of the first or the last one.
    bounded: bool
    #: Rows, of each token or of each pair, and experts of a row.
    left: Any
    repeats: int
    #: The product as a matrix of pairs, or the columns of gate and of up in it.
    columns: tuple[Var, ...]
    #: Where each of these begins, and from one column to the next.
    begins: tuple[tuple[int, int], ...]
    #: The sum over the experts of a token, their number, what each is multiplied by, and whether
    #: that is divided by its sum.
    mixed: Var | None = None
    summed: int = 1
    factor: Any = None
    normalised: bool = False

    @property
    def made(self) -> tuple[Var, ...]:
        """What the epilogue is made of."""
        return self.columns if self.mixed is None else (self.mixed,)


class ExpertsGroup(GatedGroup):
    """The product of a match, with what is made of it."""

    def outputs(self, graph: Graph) -> Iterator[tuple[Var, tuple[Var, ...]]]:
        """See `Group.outputs`; the product as a matrix of pairs may be the result, too."""
        yield from super().outputs(graph)
        if graph.operator(self.meeting) in RESHAPES:
            yield self.meeting, ()


class Experts(Chains):
    """Products by weights that indices choose, with what is made of them."""

    name = "experts"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        for variable in graph.makers:
            if graph.operator(variable) == PRODUCT and (found := _read(graph, variable)):
                yield _group(graph, found)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`."""
        return outline_experts(static)

    def ranked(self, func: Any, target: Device) -> Sequence[Plan]:
        """See `GroupKind`; against copies of the chosen weights, and products by these."""
        shape = read_experts(ir.Schedule(func)).shape
        wide = shape.wide
        of = matrix_chain(1, (wide.k, wide.n), gated=wide.products > 1)
        found = [plan_of_kernel(of, each, target) for each in best_kernels(shape, target)[:FEW]]
        if not found:
            limit = "weights of 16 bits in tiles of 16 columns, and a reduction in steps of 32"
            raise refused("main", shape.text, limit, "leave it to a library")
        rates = rates_of(target)
        copies = _PASSES * sum(wide.weight_bytes) / rates.measured.hbm_read
        kernels = _KERNELS * rates.fitted.eager_kernel
        terms = {"copies": copies, "kernels": kernels}
        apart = replace(found[0], family=EAGER, tiles={}, runners=(), kernels=(), terms=terms)
        apart = replace(apart, microseconds=copies + kernels, bound="copies")
        return in_order([*found, apart], fused=False)

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return schedule_experts(func, tiles=SkinnyTiles(**plan.tiles))


# How they are found: by dataflow, from the product back to a choice of weights along an axis.


def _read(graph: Graph, product: Var) -> Match | None:
    """The parts of a product, if it is one of rows by chosen weights."""
    one, other = graph.arguments(product)
    try:
        if is_symbolic(one) or is_symbolic(other):
            return None
    except RefusedError:  # of a shape that is not known
        return None
    first = graph.operator(one) == _TAKE
    chosen, row = (one, other) if first else (_transposed(graph, other), one)
    if graph.operator(chosen) != _TAKE or len(shape_of(chosen, _TAKE)) != _RANK:
        return None
    if not first and chosen.same_as(other):  # stored as [experts, k, n]
        return None
    weight, places = graph.arguments(chosen)
    pairs, columns, depth = shape_of(chosen, _TAKE)
    axis = graph.makers[chosen].value.attrs.axis
    if axis is None or int(axis) or len(shape_of(places, _TAKE)) != 1:
        return None
    if prod(shape_of(row, PRODUCT)) != pairs * depth or weight in graph.makers:
        return None
    source = row
    while graph.operator(source) in RESHAPES:
        (source,) = graph.arguments(source)
    repeats = _repeats(graph, row, source, pairs, depth)
    if not repeats:
        return None
    flat = _matrix(graph, product, (pairs, columns))
    given, bounded = _bounded(graph, _from_end(graph, places), shape_of(weight, _TAKE)[0])
    first = _first_of_rows(graph, given)
    begins = ((0, 1),)
    found = Match(product, pairs, weight, first, bounded, source, repeats, (flat,), begins)
    return _with_parts(graph, _with_sum(graph, found), columns)


def _transposed(graph: Graph, value: Any) -> Any:
    """What a value swaps the last two axes of; the value itself of others."""
    if graph.operator(value) != "relax.permute_dims":
        return value
    axes = graph.makers[value].value.attrs.axes
    swaps = axes is not None and [*map(int, axes)] == [0, 2, 1]
    return graph.arguments(value)[0] if swaps else value


def _repeats(graph: Graph, row: Any, source: Any, pairs: int, depth: int) -> int:
    """How often each row of the source stands in a row operand, one behind the other; else 0."""
    given = shape_of(source, PRODUCT)
    rows = prod(given) // depth
    if not given or given[-1] != depth or pairs % max(rows, 1):
        return 0
    steps, value = [], row
    while not value.same_as(source):
        steps.append(value)
        (value,) = graph.arguments(value)
    elements = np.arange(rows * depth).reshape(given)
    made = elements
    for each in reversed(steps):
        broadcasts = graph.operator(each) == "relax.broadcast_to"
        shape = shape_of(each, PRODUCT)
        made = np.broadcast_to(made, shape) if broadcasts else made.reshape(shape)
    due = elements.reshape(rows, depth).repeat(pairs // rows, axis=0)
    return pairs // rows if np.array_equal(made.reshape(pairs, depth), due) else 0


def _from_end(graph: Graph, places: Any) -> Any:
    """Places before negative ones were counted from the end, which kernels do themselves."""
    if graph.operator(places) != "relax.where":
        return places
    flags, _, plain = graph.makers[places].value.args
    same = graph.operator(flags) == "relax.less" and graph.arguments(flags)[0].same_as(plain)
    return plain if same and scalar(graph.makers[flags].value.args[1]) == 0 else places


def _bounded(graph: Graph, places: Any, experts: int) -> tuple[Any, bool]:
    """Places before they were moved to the nearest expert, and whether they were."""
    value = places
    for name, bound in (("relax.minimum", experts - 1), ("relax.maximum", 0)):
        while graph.operator(value) in RESHAPES and _has_elements_of(value, places):
            (value,) = graph.arguments(value)
        if graph.operator(value) != name:
            return places, False
        value, limit = graph.makers[value].value.args
        if scalar(limit) != bound:
            return places, False
    return value, True


def _first_of_rows(graph: Graph, value: Any) -> Any:
    """The matrix of which a value has the first columns, one row behind the other; else itself."""
    source = value
    while graph.operator(source) in RESHAPES:
        (source,) = graph.arguments(source)
    if graph.operator(source) != _SLICE or not _has_elements_of(source, value):
        return value
    node = graph.makers[source]
    (whole,) = graph.arguments(source)
    shape = shape_of(whole, _SLICE)
    axes, begins, _, *steps = (_numbers(each) for each in node.value.args[1:])
    first = begins == (0,) and (not steps or steps[0] == (1,)) and len(shape) == _MATRIX
    return whole if first and axes in ((1,), (-1,)) else value


def _has_elements_of(source: Any, value: Any) -> bool:
    """Whether reshapes of a source only give it other extents, and repeat nothing."""
    return prod(shape_of(source, _SLICE)) == prod(shape_of(value, _SLICE))


def _keeps(graph: Graph, value: Any, own: str) -> bool:
    """Whether an operator reshapes, or casts to a type that loses no more than a model's own."""
    if graph.operator(value) != CAST:
        return graph.operator(value) in RESHAPES
    return dtype_of(value) in FLOAT_TYPES and not loses(dtype_of(value), {own})


def _normalised(graph: Graph, value: Any, own: str) -> tuple[Any, bool]:
    """What a factor divides by its sum over the last axis, and whether it does."""
    source = value
    while _keeps(graph, source, own):
        (source,) = graph.arguments(source)
    if graph.operator(source) != "relax.divide" or not _has_elements_of(source, value):
        return value, False
    one, other = graph.arguments(source)
    if graph.operator(other) != _SUM or not graph.arguments(other)[0].same_as(one):
        return value, False
    axes = [int(each) for each in graph.makers[other].value.attrs.axis or ()]
    last = len(shape_of(one, _SUM)) - 1
    return (one, True) if axes in ([last], [-1]) else (value, False)


def _matrix(graph: Graph, product: Var, shape: tuple[int, ...]) -> Var:
    """The product as a matrix of pairs: the last reshape of it that keeps them apart."""
    value, found = product, product
    while (node := _reader(graph, value)) is not None and node.operator in RESHAPES:
        value = node.var
        found = value if shape_of(value, PRODUCT) == shape else found
    return found


def _reader(graph: Graph, value: Any) -> Any:
    """The only reader of a value; None with more, or of a result."""
    if value in graph.results or len(graph.readers[value]) != 1:
        return None
    (node,) = graph.readers[value]
    return node


def _with_sum(graph: Graph, found: Match) -> Match:
    """With the sum over neighbouring pairs, and the factor of each, if that is what follows."""
    (value,), factor = found.columns, None
    while (node := _reader(graph, value)) is not None:
        if node.operator == _SUM:
            experts = _summed(graph, node, found)
            return _added(graph, found, node.var, experts, factor) if experts > 1 else found
        if node.operator == _TIMES and factor is None:
            factor = _factor(graph, node, value, found.pairs)
            if factor is None:
                return found
        elif not _keeps(graph, node.var, dtype_of(found.left)):
            return found
        value = node.var
    return found


def _added(graph: Graph, found: Match, mixed: Var, experts: int, factor: Any) -> Match:
    """A match whose pairs are added up, with what makes their factors as far as kernels do it."""
    if factor is None:
        return replace(found, mixed=mixed, summed=experts)
    source, divided = _normalised(graph, factor, dtype_of(found.left))
    divided = divided and shape_of(source, _SUM)[-1] == experts
    first = _first_of_rows(graph, source if divided else factor)
    return replace(found, mixed=mixed, summed=experts, factor=first, normalised=divided)


def _factor(graph: Graph, node: Any, value: Any, pairs: int) -> Any:
    """What a matrix of pairs is multiplied by, if that is a number for each pair."""
    others = [each for each in graph.arguments(node.var) if not each.same_as(value)]
    shape = shape_of(others[0], _TIMES) if len(others) == 1 else ()
    each = bool(shape) and prod(shape) == pairs and shape[-1] == 1
    return others[0] if each and _has_elements_of(value, node.var) else None


def _summed(graph: Graph, node: Any, found: Match) -> int:
    """Neighbouring pairs that a sum adds up; 0 if it is another one."""
    shape = shape_of(graph.arguments(node.var)[0], _SUM)
    axes = [int(each) % len(shape) for each in node.value.attrs.axis or ()]
    columns = shape_of(found.columns[0], PRODUCT)[-1]
    known = axes == [len(shape) - 2] and shape[-1] == columns
    return shape[-2] if known and prod(shape[:-1]) == found.pairs else 0


def _with_parts(graph: Graph, found: Match, columns: int) -> Match:
    """With the columns of gate and of up, if both are read of the product."""
    (flat,) = found.columns
    nodes = graph.readers[flat]
    if found.mixed is not None or flat in graph.results or len(nodes) != 2:
        return found
    begins = [_part(each, columns) for each in nodes]
    if None in begins or {begin for begin in begins if begin} not in (
        {(0, 1), (columns // 2, 1)},
        {(0, 2), (1, 2)},
    ):
        return found
    # Gate is what is read first.
    parts = tuple(each.var for each in nodes)
    return replace(found, columns=parts, begins=tuple(each for each in begins if each))


def _part(node: Any, columns: int) -> tuple[int, int] | None:
    """First column and step of a slice of half of the columns; None of another operator."""
    if node.operator != _SLICE:
        return None
    axes, begins, ends, *steps = (_numbers(each) for each in node.value.args[1:])
    step = steps[0] if steps else (1,)
    last = len(node.value.args[0].ty.shape.values) - 1
    if axes not in ((last,), (-1,)) or any(len(each) != 1 for each in (begins, ends, step)):
        return None
    taken = range(*slice(begins[0], ends[0], step[0]).indices(columns))
    return (taken.start, taken.step) if len(taken) * 2 == columns else None


def _numbers(given: Any) -> tuple[int, ...]:
    fields = getattr(given, "fields", getattr(given, "values", ()))
    return tuple(int(getattr(each, "value", each)) for each in fields)


def _group(graph: Graph, found: Match) -> Group:
    """The group of a match; its result is what the first operator makes that needs all parts."""
    meeting = _meeting(graph, found.made)
    given = (found.weight, found.places, found.left, found.factor)
    stops = [each for each in given if each is not None]
    inside = set(graph.reach(meeting, stops)[0])
    views = set(graph.reach(found.product, stops)[0]) - {found.product}
    if found.factor is not None:
        views |= {each for each in inside if found.product not in graph.reach(each, stops)[0]}
    before = tuple(each for each in graph.makers if each in inside)
    after = tuple(after_product(graph, meeting, before))
    return ExpertsGroup(((found.product,),), before, frozenset(views), after, meeting)


def _meeting(graph: Graph, made: Sequence[Var]) -> Var:
    """The first value that is made of all of some, element by element; the only one itself."""
    if len(made) == 1:
        return made[0]
    made_of: dict[Any, frozenset[Var]] = {each: frozenset({each}) for each in made}
    for value in graph.makers:
        if value not in made_of and graph.is_elementwise(value):
            sources = [made_of.get(each, frozenset()) for each in graph.arguments(value)]
            made_of[value] = frozenset().union(*sources)
            if len(made_of[value]) == len(made):
                return value
    return made[-1]


# How they are written.


def outline_experts(mod: Any) -> Outlined:
    """Turn a model of products by chosen weights into one function, see `Experts`."""
    graph = read_graph(clean(mod, "main")["main"])
    products = [each.var for each in graph.nodes if each.operator == PRODUCT]
    found = _read(graph, products[0]) if len(products) == 1 else None
    if found is None:
        limit = "one product of rows by weights that indices choose along their first axis"
        raise refused("main", f"{len(products)} products", limit, "leave it to a library")
    rows = found.pairs // found.summed
    names = ("gemm0",) if len(found.made) == 1 else ("gemm0_gate", "gemm0_up")
    products_of = dict(zip(found.made, names, strict=True))
    leaves = graph.reach(graph.output, found.made)[1]
    others = [each for each in leaves if each not in products_of and scalar(each) is None]
    named = {**products_of, **{each: f"given{at}" for at, each in enumerate(others)}}
    region = read_region(graph, graph.output, named, found.made, rows)
    extras = [each for each in region.leaves if each.value not in products_of]
    form = _form(found, names, region, extras, dtype_of(graph.output))
    given = [found.left, found.weight, found.places]
    given += [] if found.factor is None else [found.factor]
    values = chain(given, (each.value for each in extras))
    arguments = tuple(
        _argument(graph, value, operand)
        for value, operand in zip(values, form.operands, strict=True)
    )
    depth = form.left.shape[1]
    return Outlined(
        func=emit_experts(form),
        arguments=arguments,
        M=rows,
        K=depth,
        N=form.columns,
        L=form.columns,
        gated=len(names) > 1,
        dtype=form.left.dtype,
        output_shape=shape_of(graph.output, "the output"),
        output_dtype=form.out,
        middle="",
        epilogue=region.text,
        kind="experts",
    )


def _form(
    found: Match, names: Sequence[str], region: Any, extras: Sequence[Leaf], out: str
) -> ExpertsForm:
    experts, columns, depth = shape_of(found.weight, "the weights")
    pairs = found.pairs
    factor = found.factor
    return ExpertsForm(
        left=Operand("A", (pairs // found.repeats, depth), dtype_of(found.left)),
        weight=Operand("B", (experts, columns, depth), dtype_of(found.weight)),
        places=Operand("places", _rows(found.places), dtype_of(found.places)),
        products=tuple(
            ExpertProduct(name, *begin) for name, begin in zip(names, found.begins, strict=True)
        ),
        columns=columns // len(names),
        epilogue=region.function,
        extras=tuple(each.operand for each in extras),
        out=out,
        pairs=pairs,
        repeats=found.repeats,
        summed=found.summed,
        factor=None if factor is None else Operand("factor", _rows(factor), dtype_of(factor)),
        normalised=found.normalised,
        bounded=found.bounded,
    )


def _rows(value: Any) -> tuple[int, int]:
    """A matrix's extents, or all elements of another tensor as one row."""
    shape = shape_of(value, _TAKE)
    return (shape[0], shape[1]) if len(shape) == _MATRIX else (1, prod(shape))


def _argument(graph: Graph, value: Any, operand: Operand) -> Argument:
    if not isinstance(value, Var):
        return Argument(operand.name, "", -1, operand.shape, operand.dtype, value.value.numpy())
    position = list(graph.params).index(value)
    return Argument(operand.name, str(value.name), position, operand.shape, operand.dtype)
