"""Recognise layers of matrix products by their dataflow, never by names."""

from __future__ import annotations

import math
from collections.abc import Collection
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
from crossfuse.relax.scaled_rows import SUMS, ScaledRows, scaled_rows
from crossfuse.workload.dtypes import FLOAT_TYPES

_LAYERS = "A @ B or A @ B_gate and A @ B_up, then element-wise, then @ D, and so on"


@dataclass(frozen=True)
class Weight:
    """A stored right-hand side of a product."""

    #: Parameter (Var) or constant (GenericConst) of the function.
    value: Any
    #: ``"kn"`` as stored for ``A @ B``, ``"nk"`` if the model transposes it.
    layout: str


@dataclass(frozen=True)
class Layer:
    """Products of one operand, and what is made of them."""

    #: In the order in which what is made of them uses them.
    products: tuple[Var, ...]
    weights: tuple[Weight, ...]
    #: What is made, in the type in which the model stores it: an intermediate, or the output.
    made: Any


@dataclass(frozen=True)
class Match:
    """The parts of layers of products."""

    #: M, all leading extents of the input multiplied.
    rows: int
    #: The input A, a parameter.
    left: Var
    #: In order; the last one has one product, unless it is the only one.
    layers: tuple[Layer, ...]
    #: How the rows of a single layer are made of the input's; None where they are the input's.
    scaled: ScaledRows | None = None

    @property
    def products(self) -> tuple[Var, ...]:
        """All products, layer by layer."""
        return tuple(product for each in self.layers for product in each.products)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Weights in the order of the products."""
        return tuple(weight for each in self.layers for weight in each.weights)


def read_model(mod: tvm.IRModule, *, sums: bool = False) -> Graph:
    """Read the main function of a model, or its only Relax function, which has one result.

    Dead and repeated bindings are dropped. Refused are control flow, several results, dynamic
    shapes, float64, and operators that are neither matrix products nor element-wise, casts,
    transpositions and reshapes. `sums` leaves sums to who asks, see `match_layer`.
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
        _check_values(graph, node, (*SUMS, *_KNOWN) if sums else _KNOWN)
    return graph


def _check_bound(node: Node) -> None:
    """Refuse a binding unless it is of a call, which must have one tensor as its result."""
    if not isinstance(node.binding, relax.VarBinding):
        found, advice = f"a {type(node.binding).__name__}", "export without shape assertions"
        raise refused("main", found, "static shapes", advice)
    if isinstance(node.value, relax.Tuple):
        raise refused("main", "several results", "one output", "return one tensor")
    shape_of(node.var, operator(node.value))


#: Operators that are looked at elsewhere.
_KNOWN = (PRODUCT, CAST, TRANSPOSE, *RESHAPES)


def _check_values(graph: Graph, node: Node, known: Collection[str]) -> None:
    if node.operator not in known:
        check_elementwise(node.value)
    for value in (node.var, *graph.arguments(node.var)):
        if dtype_of(value) == "float64":
            advice = "convert the model to float32 or less"
            limit = "at most float32, which sums are kept in"
            raise refused(node.operator, "float64", limit, advice)


def match_chain(graph: Graph) -> Match:
    """Find the layers of a graph.

    Refused are any other arrangement of matrix products, an intermediate used elsewhere, computed
    weights, and operands of different types.
    """
    products = [each.var for each in graph.nodes if each.operator == PRODUCT]
    weights = {product: _weight(graph, product) for product in products}
    inputs = {p: graph.reach(graph.makers[p].value.args[0], products) for p in products}
    feeds = {p: [leaf for leaf in inputs[p][1] if leaf in weights] for p in products}
    return _matched(graph, _arranged(graph, products, feeds), weights)


def match_layer(graph: Graph, count: int) -> Match:
    """Find the only layer of a graph, of so many products, as `match_chain` finds several."""
    products = [each.var for each in graph.nodes if each.operator == PRODUCT]
    used = graph.reach(graph.output, products)[1]
    layer = tuple(each for each in used if each in products)
    if len(products) != count or len(layer) != count:
        limit = f"{('one', 'two of one operand')[count - 1]}, then element-wise operators"
        found, instead = f"{len(products)} matrix products", "outline the chain that they are"
        raise refused("main", found, limit, instead)
    match = _matched(graph, [layer], {each: _weight(graph, each) for each in layer})
    inside = match.scaled.inner if match.scaled else ()
    for node in graph.nodes:
        if node.operator in SUMS and node.var not in inside:
            check_elementwise(node.value)  # which refuses them, with the reason
    return match


def _matched(graph: Graph, found: list[tuple[Var, ...]], weights: dict[Var, Weight]) -> Match:
    """The parts of layers whose products are known; refuses what kernels do not compute."""
    _check_used_once(graph, found)
    lefts = [_operand(graph, each) for each in found]
    scaled = scaled_rows(graph, lefts[0]) if len(found) == 1 else None
    source = lefts[0] if scaled is None else _stored(graph, scaled.source, found[0][0])
    left = _input(graph, found[0], source)
    made = (*lefts[1:], graph.output)
    layers = tuple(
        Layer(each, tuple(weights[p] for p in each), result)
        for each, result in zip(found, made, strict=True)
    )
    match = Match(_rows(left), left, layers, scaled)
    _check_types(match)
    return match


def _arranged(
    graph: Graph, products: list[Var], feeds: dict[Var, list[Var]]
) -> list[tuple[Var, ...]]:
    """Layers of products, in order; refuses what is no row of them."""
    later = [p for p in products if feeds[p]]
    if len(products) < 2 or not later:
        counts = {0: "no matrix product", 1: "one matrix product"}
        found = counts.get(len(products), f"{len(products)} products that do not feed each other")
        raise refused("main", found, _LAYERS, "leave it to a library, there is nothing to fuse")
    read = {each for p in products for each in feeds[p]}
    ends = [p for p in later if p not in read]
    if len(ends) > 1:
        found = f"an intermediate used twice, by {len(ends)} matrix products"
        raise refused(_place(graph, ends[1]), found, _LAYERS, "outline one of the products")
    stray = [p for p in products if p not in (*read, *ends)]
    if stray:
        found = "a product that the second layer does not read"
        raise refused(_place(graph, stray[0]), found, _LAYERS, "leave that product out")
    layers: list[tuple[Var, ...]] = [tuple(ends)]
    while before := feeds[layers[0][0]]:
        _check_layer(graph, layers[0], feeds)
        layers.insert(0, tuple(before))
    _check_layer(graph, layers[0], feeds)
    return layers


def _check_layer(graph: Graph, layer: tuple[Var, ...], feeds: dict[Var, list[Var]]) -> None:
    """Refuse more than two products, and those that read different products."""
    if len(layer) > 2:
        found = f"{len(layer)} products of {'an intermediate' if feeds[layer[0]] else 'the input'}"
        raise refused(
            _place(graph, layer[2]), found, _LAYERS, "join their weights, or split the graph"
        )
    for each in layer[1:]:
        if set(feeds[each]) != set(feeds[layer[0]]):
            found = "products of one layer that are made of different products"
            raise refused(_place(graph, each), found, _LAYERS, "outline fewer layers at a time")


def _check_used_once(graph: Graph, layers: list[tuple[Var, ...]]) -> None:
    """Refuse an intermediate that is read by anything but the next layer."""
    earlier, last = [p for each in layers[:-1] for p in each], layers[-1]
    inner, leaves = graph.reach(graph.output, [*earlier, *last])
    if not any(leaf in earlier for leaf in leaves):
        return
    known = set(earlier)
    for layer in layers[1:]:
        known |= set(graph.reach(graph.makers[layer[0]].value.args[0], earlier)[0])
    after = [v for v in inner if v not in known]
    readers = (v for v in after if known.intersection(graph.arguments(v)))
    reader = next(readers, last[0])
    place = "second" if len(layers) == 2 else "next"
    found = f"an intermediate used twice, by the {place} product and by {graph.operator(reader)}"
    advice = "keep that use out of the graph, or leave the model unfused"
    raise refused(_place(graph, reader), found, "an intermediate that nothing else reads", advice)


def _operand(graph: Graph, layer: tuple[Var, ...]) -> Any:
    """What all products of a layer multiply, as it is stored."""
    operands = [_stored(graph, graph.makers[each].value.args[0], each) for each in layer]
    if any(not operand.same_as(operands[0]) for operand in operands):
        names = " and ".join(operand.name for operand in operands)
        found = f"products of different inputs, {names}"
        raise refused(
            _place(graph, layer[1]), found, _LAYERS, "join the inputs, or split the graph"
        )
    return operands[0]


def _input(graph: Graph, layer: tuple[Var, ...], operand: Any) -> Var:
    if operand in graph.makers:
        found = f"an input changed by {graph.operator(operand)} before the first product"
        advice = "apply that operator outside the graph"
        raise refused(_place(graph, layer[0]), found, "an input taken as it is", advice)
    if not isinstance(operand, Var):
        found, advice = "a constant input", "make it a parameter"
        raise refused(_place(graph, layer[0]), found, "a parameter", advice)
    return operand


def _weight(graph: Graph, product: Var) -> Weight:
    """Follow a right-hand side through transpositions, reshapes to itself and exact casts."""
    value, transposed = graph.makers[product].value.args[1], False
    while value in graph.makers:
        source, name = graph.makers[value].value.args[0], graph.operator(value)
        if name == TRANSPOSE and len(shape_of(value, name)) == 2:
            axes = graph.makers[value].value.attrs.axes
            transposed ^= axes is None or [int(axis) for axis in axes] == [1, 0]
        elif not (graph.is_exact_cast(value) or _same_shape(value, source, name)):
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
    while graph.is_exact_cast(value) or _same_elements(graph, value):
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


def _same_shape(value: Any, source: Any, name: str) -> bool:
    return name in RESHAPES and shape_of(value, name) == shape_of(source, name)


def _rows(left: Var) -> int:
    *leading, _ = shape = shape_of(left, left.name)
    if len(shape) not in (2, 3):
        found = f"{left.name} of rank {len(shape)}"
        raise refused("main", found, "[M, K] or [B, S, K]", "reshape the input")
    return math.prod(leading)


def _check_types(match: Match) -> None:
    *earlier, last = match.layers
    values = [match.left]
    for layer in earlier:
        values += [*(each.value for each in layer.weights), layer.made]
    values += [each.value for each in last.weights]
    types = {_name(value): dtype_of(value) for value in values}
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
