"""How products by the weights of chosen experts are found: by dataflow, back to a choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import CAST, PRODUCT, RESHAPES, dtype_of, scalar, shape_of
from crossfuse.relax.symbols import is_symbolic
from crossfuse.relax.views import VIEWS, axes_of, merged, source_of
from crossfuse.workload.dtypes import FLOAT_TYPES, loses

_ADD, _TAKE, _SLICE, _SUM, _TIMES = (
    f"relax.{name}" for name in ("add", "take", "strided_slice", "sum", "multiply")
)
_RANK, _MATRIX = 3, 2


@dataclass(frozen=True)
class Match:
    """The parts of products by chosen weights."""

    product: Var
    #: Pairs of a token and an expert.
    pairs: int
    #: Weights of all experts, and whether they are stored as [experts, n, k].
    weight: Any
    k_major: bool
    #: The expert of each pair: the first ones of each row.
    places: Any
    #: Whether places beyond the experts are those of the first or the last one.
    bounded: bool
    #: Rows, of each token or of each pair, and experts of a row.
    left: Any
    repeats: int
    #: The product as a matrix of pairs, or the columns of gate and of up in it.
    columns: tuple[Var, ...]
    #: Where each of these begins, and from one column to the next.
    begins: tuple[tuple[int, int], ...] = ((0, 1),)
    #: What is added to them, of each expert.
    bias: Any = None
    #: The sum over the experts of a token, their number, what each is multiplied by, and whether
    #: that is divided by its sum.
    mixed: Var | None = None
    summed: int = 1
    factor: Any = None
    normalised: bool = False

    @property
    def given(self) -> tuple[Any, ...]:
        """What a kernel reads, but for what the epilogue does."""
        others = (each for each in (self.factor, self.bias) if each is not None)
        return (self.left, self.weight, self.places, *others)

    @property
    def made(self) -> tuple[Var, ...]:
        """What the epilogue is made of."""
        return self.columns if self.mixed is None else (self.mixed,)


def read_match(graph: Graph, product: Var) -> Match | None:
    """The parts of a product, if it is one of rows by chosen weights."""
    one, other = graph.arguments(product)
    try:
        if is_symbolic(one) or is_symbolic(other):
            return None
    except RefusedError:  # of a shape that is not known
        return None
    for value, row, first in ((one, other, True), (other, one, False)):
        chosen = source_of(graph, value)
        if _is_choice(graph, chosen, _RANK):
            return _multiplied(graph, product, chosen, (value, row, first))
    return None


def _multiplied(
    graph: Graph, product: Var, chosen: Any, operands: tuple[Any, Any, bool]
) -> Match | None:
    """The parts of a product by chosen weights: their view, the rows, and whether it is first."""
    value, row, first = operands
    weight, places = graph.arguments(chosen)
    k_major = _stored(graph, value, chosen, first)
    if k_major is None or weight in graph.makers:
        return None
    *given, rows, width = shape_of(chosen, _TAKE)
    columns, depth = (rows, width) if k_major else (width, rows)
    pairs = prod(given)
    if prod(shape_of(product, PRODUCT)) != pairs * columns:
        return None
    for operators in (VIEWS, RESHAPES):
        source = source_of(graph, row, operators)
        if repeats := _repeats(graph, row, source, (pairs, depth, first)):
            break
    else:
        return None
    flat = _matrix(graph, product, (pairs, columns))
    places, bounded = _places(graph, places, shape_of(weight, _TAKE)[0])
    found = Match(product, pairs, weight, k_major, places, bounded, source, repeats, (flat,))
    return _with_parts(graph, _with_sum(graph, _with_bias(graph, found)), columns)


def _stored(graph: Graph, value: Any, chosen: Any, first: bool) -> bool | None:
    """Whether chosen weights are stored as [n, k]; None where an operand has them otherwise.

    A matrix of it has the weights of a pair, or of some that multiply the same row.
    """
    axes = axes_of(graph, value, chosen)
    if axes is None or len(axes) < _RANK:
        return None
    *batch, columns, depth = axes if first else (*axes[:-2], axes[-1], axes[-2])
    *given, rows, width = shape_of(chosen, _TAKE)
    pairs = (prod(given), rows * width)
    for k_major, n, k in ((True, (rows, width), (width, 1)), (False, (width, 1), (rows, width))):
        if merged(*batch, columns) == merged((pairs, n)) and merged(depth) == merged((k,)):
            return k_major
    return None


def _is_choice(graph: Graph, value: Any, rank: int) -> bool:
    """Whether an operator chooses along the first axis of a tensor of some rank."""
    if graph.operator(value) != _TAKE or len(graph.arguments(value)) != 2:
        return False
    axis = graph.makers[value].value.attrs.axis
    whole, _ = graph.arguments(value)
    return axis is not None and not int(axis) and len(shape_of(whole, _TAKE)) == rank


def _places(graph: Graph, places: Any, experts: int) -> tuple[Any, bool]:
    """The experts of each pair as a kernel reads them, and whether it moves them to the nearest."""
    given, bounded = _bounded(graph, _from_end(graph, places), experts)
    return _first_of_rows(graph, given), bounded


def _with_bias(graph: Graph, found: Match) -> Match:
    """With what is added to the products of each expert, if that is what follows."""
    (flat,) = found.columns
    node = _reader(graph, flat)
    if node is None or node.operator != _ADD:
        return found
    others = [each for each in graph.arguments(node.var) if not each.same_as(flat)]
    chosen = others[0] if len(others) == 1 else flat
    while graph.operator(chosen) in RESHAPES and _has_elements_of(chosen, node.var):
        (chosen,) = graph.arguments(chosen)
    if not _is_choice(graph, chosen, _MATRIX):
        return found
    bias, places = graph.arguments(chosen)
    shape = shape_of(flat, _ADD)
    experts = shape_of(found.weight, _TAKE)[0]
    if bias in graph.makers or shape_of(bias, _ADD) != (experts, shape[-1]):
        return found
    first, bounded = _places(graph, places, experts)
    if not first.same_as(found.places) or bounded != found.bounded:
        return found
    return replace(found, columns=(_matrix(graph, node.var, shape),), bias=bias)


def _repeats(graph: Graph, row: Any, source: Any, of: tuple[int, int, bool]) -> int:
    """How often each row of the source is multiplied, one pair behind the other; 0 if otherwise.

    `of` has the pairs, the depth, and whether weights are the first operand.
    """
    pairs, depth, first = of
    axes, shape = axes_of(graph, row, source), shape_of(source, PRODUCT)
    if axes is None or len(axes) < _RANK or not shape or shape[-1] != depth:
        return 0
    *batch, columns, sums = axes if not first else (*axes[:-2], axes[-1], axes[-2])
    rows, matrices = prod(shape) // depth, prod(extent for axis in batch for extent, _ in axis)
    if merged(columns) or merged(sums) != merged(((depth, 1),)):
        return 0
    if pairs % rows or pairs % matrices:
        return 0
    due = ((rows, depth), (pairs // rows, 0))
    taken = merged(*batch, ((pairs // matrices, 0),))
    return pairs // rows if taken == merged(due) else 0


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
    """The product as rows of pairs: the last view of it that has them, in their order."""
    value, found = product, product
    while (node := _reader(graph, value)) is not None and node.operator in VIEWS:
        value = node.var
        axes = axes_of(graph, value, product)
        if axes is None or merged(*axes) != merged(((prod(shape), 1),)):
            return found
        found = value if shape_of(value, PRODUCT)[-1] == shape[-1] else found
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
    nodes = list(_readers(graph, flat))
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


def _readers(graph: Graph, value: Any) -> Iterator[Any]:
    """What reads a value, through reshapes that keep its columns."""
    columns = shape_of(value, _SLICE)[-1]
    for node in graph.readers[value]:
        if node.operator in RESHAPES and shape_of(node.var, _SLICE)[-1] == columns:
            yield from _readers(graph, node.var)
        else:
            yield node


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
