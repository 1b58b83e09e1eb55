"""Recognise two layers of matrix products by their dataflow, never by names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import GenericConst, Var

from crossfuse.relax.graph import Graph, Node, clean, read_graph
from crossfuse.relax.operators import (
    CAST,
    PRODUCT,
    RESHAPES,
    TRANSPOSE,
    check_elementwise,
    dtype_of,
    operator,
    refused,
    shape_of,
)
from crossfuse.workload.dtypes import FLOAT_TYPES

_TWO = "A @ B or A @ B_gate and A @ B_up, then element-wise, then @ D"


@dataclass(frozen=True)
class Weight:
    """A stored right-hand side of a product."""

    #: Parameter (Var) or constant (GenericConst) of the function.
    value: Any
    #: ``"kn"`` as stored for ``A @ B``, ``"nk"`` if the model transposes it.
    layout: str


@dataclass(frozen=True)
class Match:
    """The parts of two layers of products."""

    #: M, all leading extents of the input multiplied.
    rows: int
    #: The input A, a parameter.
    left: Var
    #: The products of A in the order in which the intermediate uses them.
    first: tuple[Var, ...]
    first_weights: tuple[Weight, ...]
    #: The intermediate, in the type in which the model stores it.
    hidden: Var
    #: The product of the intermediate.
    second: Var
    second_weight: Weight


def read_model(mod: tvm.IRModule) -> Graph:
    """Read the main function of a model, or its only Relax function, which has one result.

    Dead and repeated bindings are dropped. Refused are control flow, several results, dynamic
    shapes, float64, and operators that are neither matrix products nor element-wise, casts,
    transpositions and reshapes.
    """
    functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    name = "main" if "main" in functions else next(iter(functions), "")
    if not name or (name != "main" and len(functions) > 1):
        found = ", ".join(functions) or "no Relax function"
        raise refused("module", found, "one Relax function, or main", "name the function main")
    function = clean(mod, name)[name]
    graph = read_graph(function)
    for node in graph.nodes:
        _check_bound(node)
    if function.body.body not in graph.makers:
        shape_of(function.body.body, "the output")
        raise refused("main", "no operator", "two matrix products", "leave the model as it is")
    for node in graph.nodes:
        _check_values(graph, node)
    return graph


def _check_bound(node: Node) -> None:
    """Refuse a binding unless it is of a call, which must have one tensor as its result."""
    if not isinstance(node.binding, relax.VarBinding):
        found, advice = f"a {type(node.binding).__name__}", "export without shape assertions"
        raise refused("main", found, "static shapes", advice)
    if isinstance(node.value, relax.Tuple):
        raise refused("main", "several results", "one output", "return one tensor")
    shape_of(node.var, operator(node.value))


def _check_values(graph: Graph, node: Node) -> None:
    if node.operator not in {PRODUCT, CAST, TRANSPOSE, *RESHAPES}:
        check_elementwise(node.value)
    for value in (node.var, *graph.arguments(node.var)):
        if dtype_of(value) == "float64":
            advice = "convert the model to float32 or less"
            limit = "at most float32, which sums are kept in"
            raise refused(node.operator, "float64", limit, advice)


def match_chain(graph: Graph) -> Match:
    """Find the two layers of a graph.

    Refused are any other number or arrangement of matrix products, an intermediate used elsewhere,
    computed weights, and operands of different types.
    """
    products = [each.var for each in graph.nodes if each.operator == PRODUCT]
    weights = {product: _weight(graph, product) for product in products}
    inputs = {p: graph.reach(graph.makers[p].value.args[0], products) for p in products}
    feeds = {p: [leaf for leaf in inputs[p][1] if leaf in weights] for p in products}
    _check_arrangement(graph, products, feeds)
    second = next(p for p in products if feeds[p])
    first = tuple(feeds[second])
    _check_used_once(graph, first, second)
    left = _left(graph, first)
    hidden = _stored(graph, graph.makers[second].value.args[0], second)
    match = Match(
        rows=_rows(left),
        left=left,
        first=first,
        first_weights=tuple(weights[p] for p in first),
        hidden=hidden,
        second=second,
        second_weight=weights[second],
    )
    _check_types(match)
    return match


def _check_arrangement(graph: Graph, products: list[Var], feeds: dict[Var, list[Var]]) -> None:
    later = [p for p in products if feeds[p]]
    deep = [p for p in later if any(feeds[q] for q in feeds[p])]
    first = [p for p in products if not feeds[p]]
    if deep:
        found = "three matrix products in a row"
        raise refused(_place(graph, deep[0]), found, _TWO, "outline two layers at a time")
    if len(products) < 2 or not later:
        counts = {0: "no matrix product", 1: "one matrix product"}
        found = counts.get(len(products), f"{len(products)} products that do not feed each other")
        raise refused("main", found, _TWO, "leave it to a library, there is nothing to fuse")
    if len(later) > 1:
        found = f"an intermediate used twice, by {len(later)} matrix products"
        raise refused(_place(graph, later[1]), found, _TWO, "outline one of the products")
    stray = [p for p in first if p not in feeds[later[0]]]
    if stray:
        found = "a product that the second layer does not read"
        raise refused(_place(graph, stray[0]), found, _TWO, "leave that product out")
    if len(first) > 2:
        found = f"{len(first)} products of the input"
        raise refused(
            _place(graph, first[2]), found, _TWO, "join their weights, or split the graph"
        )


def _check_used_once(graph: Graph, first: tuple[Var, ...], second: Var) -> None:
    """Refuse an intermediate that is read by anything but the second product."""
    inner, leaves = graph.reach(graph.output, [*first, second])
    if not any(leaf in first for leaf in leaves):
        return
    middle, _ = graph.reach(graph.makers[second].value.args[0], first)
    known = {*first, *middle}
    after = [v for v in inner if v not in known]
    readers = (v for v in after if known.intersection(graph.arguments(v)))
    reader = next(readers, second)
    found = f"an intermediate used twice, by the second product and by {graph.operator(reader)}"
    advice = "keep that use out of the graph, or leave the model unfused"
    raise refused(_place(graph, reader), found, "an intermediate that nothing else reads", advice)


def _left(graph: Graph, first: tuple[Var, ...]) -> Var:
    operands = [_stored(graph, graph.makers[product].value.args[0], product) for product in first]
    for operand, product in zip(operands, first, strict=True):
        if operand in graph.makers:
            found = f"an input changed by {graph.operator(operand)} before the first product"
            advice = "apply that operator outside the graph"
            raise refused(_place(graph, product), found, "an input taken as it is", advice)
        if not isinstance(operand, Var):
            found, advice = "a constant input", "make it a parameter"
            raise refused(_place(graph, product), found, "a parameter", advice)
    if any(not operand.same_as(operands[0]) for operand in operands):
        names = " and ".join(operand.name for operand in operands)
        found = f"first products of different inputs, {names}"
        raise refused(_place(graph, first[1]), found, _TWO, "join the inputs, or split the graph")
    return operands[0]


def _weight(graph: Graph, product: Var) -> Weight:
    """Follow a right-hand side through transpositions, reshapes to itself and exact casts."""
    value, transposed = graph.makers[product].value.args[1], False
    while value in graph.makers:
        source, name = graph.makers[value].value.args[0], graph.operator(value)
        if name == TRANSPOSE and len(shape_of(value, name)) == 2:
            axes = graph.makers[value].value.attrs.axes
            transposed ^= axes is None or [int(axis) for axis in axes] == [1, 0]
        elif not (_exact_cast(graph, value) or _same_shape(value, source, name)):
            fault = "is a product itself" if name == PRODUCT else f"is computed by {name}"
            found, limit = f"a right-hand side that {fault}", "weights stored as matrices"
            raise refused(_place(graph, product), found, limit, "prepare the weight outside")
        value = source
    rank = len(shape_of(value, PRODUCT))
    if rank != 2:
        found, limit = f"a right-hand side of rank {rank}", "weights of rank 2"
        raise refused(_place(graph, product), found, limit, "multiply one matrix at a time")
    return Weight(value, "nk" if transposed else "kn")


def _stored(graph: Graph, left: Any, product: Var) -> Any:
    """Look through reshapes and exact casts of a left-hand side: kernels do them on loading."""
    value = left
    while _exact_cast(graph, value) or _same_elements(graph, value):
        value = graph.makers[value].value.args[0]
    before, after = (shape_of(v, PRODUCT) for v in (value, left))
    if before[-1:] != after[-1:]:
        found = f"a left-hand side reshaped from {list(before)} to {list(after)}"
        raise refused(_place(graph, product), found, "rows kept whole", "reshape outside the graph")
    return value


def _same_elements(graph: Graph, value: Any) -> bool:
    name = graph.operator(value)
    if name not in RESHAPES:
        return False
    return math.prod(shape_of(value, name)) == math.prod(
        shape_of(graph.makers[value].value.args[0], name)
    )


def _exact_cast(graph: Graph, value: Any) -> bool:
    """Whether a value is a cast to a type that holds every value of the source's type."""
    if graph.operator(value) != CAST:
        return False
    source, target = dtype_of(graph.makers[value].value.args[0]), dtype_of(value)
    return source == target or (source in FLOAT_TYPES and target == "float32")


def _same_shape(value: Any, source: Any, name: str) -> bool:
    return name in RESHAPES and shape_of(value, name) == shape_of(source, name)


def _rows(left: Var) -> int:
    *leading, _ = shape = shape_of(left, left.name)
    if len(shape) not in (2, 3):
        found = f"{left.name} of rank {len(shape)}"
        raise refused("main", found, "[M, K] or [B, S, K]", "reshape the input")
    return math.prod(leading)


def _check_types(match: Match) -> None:
    values = (match.left, *(w.value for w in match.first_weights), match.hidden)
    types = {_name(value): dtype_of(value) for value in (*values, match.second_weight.value)}
    for name, dtype in types.items():
        if dtype not in FLOAT_TYPES:
            limit = ", ".join(FLOAT_TYPES)
            raise refused(name, dtype, limit, "convert the model to one of these")
    if len(set(types.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in types.items())
        raise refused("main", found, "one type for all operands", "convert the model to one type")


def _name(value: Any) -> str:
    return "a constant" if isinstance(value, GenericConst) else str(value.name)


def _place(graph: Graph, value: Any) -> str:
    return f"{graph.operator(value)} ({value.name})"
