"""Rows that are scaled by a function of one sum over them, such as those of an RMS norm.

``(x * rsqrt(mean(x * x) + eps) * gain) @ w`` is ``((x * gain) @ w) * rsqrt(...)``: what multiplies
rows need not wait for their sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Var

from crossfuse.relax.elementwise import Leaf, read_region
from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import CAST, RESHAPES, dtype_of, shape_of
from crossfuse.workload.build import Scaled

#: Operators that add up rows.
SUMS = frozenset({"relax.sum", "relax.mean"})
#: Operators of a norm, at most.
_MOST = 32


@dataclass(frozen=True)
class ScaledRows:
    """Where scaled rows come from."""

    #: The rows, and the value that they are made of.
    rows: Var
    source: Any
    #: Bindings that make them of it, in order.
    inner: tuple[Var, ...]
    #: The sum or mean, and the only value of one element a row that rows read.
    total: Var
    factor: Var
    #: Whether rows are divided by it.
    divides: bool

    def read(
        self, graph: Graph, named: Mapping[Any, str], rows: int
    ) -> tuple[Scaled, tuple[Leaf, ...]]:
        """Write them as expressions, and list the tensors that these read.

        Refused is what `crossfuse.relax.elementwise.read_region` refuses.
        """
        (summed,) = graph.arguments(self.total)
        term = read_region(graph, summed, named, (), rows)
        known = {**named, self.factor: _FACTOR}
        element = read_region(graph, self.rows, known, (), rows, (self.factor,))
        factor = read_region(graph, self.factor, {self.total: _TOTAL}, (), rows, (self.total,))
        mean = graph.operator(self.total) == "relax.mean"
        share = 1 / shape_of(summed, "the rows")[-1] if mean else 1.0

        def scaled(product: Any, total: Any) -> Any:
            value = total * tirx.const(share, "float32") if mean else total
            made = factor.function({_TOTAL: lambda *_: value}, 0, 0)
            # The reciprocal of a denormal number would be infinite.
            return product / made if self.divides else made * product

        def unscaled(tensors: Mapping[str, Any], i: Any, k: Any) -> Any:
            one = tirx.const(1, "float32")
            return element.function({**tensors, _FACTOR: lambda *_: one}, i, k)

        leaves = {each.operand.name: each for each in (*term.leaves, *element.leaves)}
        leaves.pop(_FACTOR, None)
        return Scaled(term.function, unscaled, scaled), tuple(leaves.values())


_FACTOR, _TOTAL = "factor", "total"


def scaled_rows(graph: Graph, rows: Any) -> ScaledRows | None:
    """Find where scaled rows come from; None of rows that are made otherwise.

    They come from one value: the last that all of their elements are made of. Rows of float16 are
    left out: without their factor, elements could be too large for it.
    """
    if rows not in graph.makers or dtype_of(rows) != "bfloat16":
        return None
    shape = shape_of(rows, "rows")
    pending: set[Any] = {rows}
    inner: set[Any] = set()
    while pending and len(inner) < _MOST:
        value = max(pending, key=lambda each: _place(graph, each))
        if len(pending) == 1 and any(graph.operator(each) in SUMS for each in inner):
            return _checked(graph, rows, value, inner)
        if not (_is_sum(graph, value, shape) or graph.is_elementwise(value)):
            return None
        pending.remove(value)
        inner.add(value)
        pending |= {each for each in graph.arguments(value) if _is_of_rows(each, shape)}
    return None


def _place(graph: Graph, value: Any) -> int:
    return graph.makers[value].place if value in graph.makers else -1


def _is_of_rows(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the elements of all rows, or one for each row."""
    return len(shape) > 1 and shape_of(value, "rows") in (shape, (*shape[:-1], 1))


def _is_sum(graph: Graph, value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is the sum or mean of each row, in one element."""
    if graph.operator(value) not in SUMS or shape_of(value, "rows") != (*shape[:-1], 1):
        return False
    axes = graph.makers[value].value.attrs.axis
    return axes is not None and [int(e) % len(shape) for e in axes] == [len(shape) - 1]


def _checked(graph: Graph, rows: Any, source: Any, inner: set[Any]) -> ScaledRows | None:
    """What was found, if there is one sum, and rows are made by one factor that follows from it."""
    shape = shape_of(rows, "rows")
    made = tuple(each for each in graph.makers if each in inner)
    totals = [each for each in made if graph.operator(each) in SUMS]
    narrow = [each for each in made if shape_of(each, "rows") != shape]
    read = {a for each in made if each not in narrow for a in graph.arguments(each) if a in narrow}
    if len(totals) != 1 or len(read) != 1 or shape_of(source, "rows") != shape:
        return None
    (factor,) = read
    power = _power(graph, rows, factor, _made_of(graph, factor, made))
    stored: Any = source
    casts: list[Any] = []
    while graph.is_exact_cast(stored):
        casts.insert(0, stored)
        (stored,) = graph.arguments(stored)
    # Rows are read as they are stored, in the type of the product.
    reads = rows in _made_of(graph, source, [each for each in made if not each.same_as(factor)])
    if not power or not reads or dtype_of(stored) != dtype_of(rows):
        return None
    return ScaledRows(rows, stored, (*casts, *made), totals[0], factor, power == -1)


def _made_of(graph: Graph, value: Any, operators: Iterable[Var]) -> set[Any]:
    """A value, and what some operators, in order, make of it."""
    found: set[Any] = {value}
    for each in operators:
        if found.intersection(graph.arguments(each)):
            found.add(each)
    return found


def _power(graph: Graph, value: Any, factor: Any, has: set[Any]) -> int:
    """1 if a value is a factor times what does not have it, -1 if it is divided by it, else 0.

    `has` are the factor and what is made of it.
    """
    if value.same_as(factor) or value not in has:
        return int(value.same_as(factor))
    name, given = graph.operator(value), graph.arguments(value)
    if name == CAST or name in RESHAPES:
        return _power(graph, given[0], factor, has)
    having = [place for place, each in enumerate(given) if each in has]
    if name not in ("relax.multiply", "relax.divide") or len(having) != 1:
        return 0
    power = _power(graph, given[having[0]], factor, has)
    return -power if name == "relax.divide" and having == [1] else power
