"""Softmaxes over rows with one more number, of which the row alone is read: attention sinks.

A model concatenates a column to its scores, takes a softmax of both, and drops the column. Scores
in two tensors stream in no loop; but the column is one term of a row's sum, which nothing else
depends on. So the softmax becomes a function of the scores that knows that term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax, te, tirx

from crossfuse import _tvm as ir
from crossfuse.relax.graph import Graph, read_graph, with_bindings
from crossfuse.relax.operators import CAST, dtype_of, scalar

#: Largest difference of a sink and a row's largest score: of more, what a score weighs is no number
#: of float32, and the power would be infinite. Of a row that is all masked, the sink weighs all.
_MOST = 88.0
_LAST = -1


@dataclass(frozen=True)
class Sink:
    """The parts of a softmax with a sink."""

    #: Scores, [..., length], and the number that stands behind each row or in front, [..., 1].
    scores: Any
    column: Any
    #: Types that scores are rounded to on their way to the softmax, and its results behind it.
    before: tuple[str, ...]
    behind: tuple[str, ...]


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.JoinSinks")
class JoinSinks:
    """Make softmaxes with a sink functions of the scores, and of the sink of each row.

    A pass over modules before ``LegalizeOps`` and `WideArithmetic`. What made them stays where it
    is read elsewhere.
    """

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `JoinSinks`."""
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
                mod = _joined(mod, name, function)
        return mod


def _joined(mod: Any, name: Any, function: Any) -> Any:
    graph = read_graph(function)
    every = {node.var: read_sink(graph, node.var) for node in graph.nodes}
    found = {var: each for var, each in every.items() if each is not None}
    if not found:
        return mod
    builder = relax.BlockBuilder(mod)
    calls: Mapping[Any, Any] = {
        var: builder.call_te(
            partial(_weights, each), each.scores, each.column, primfunc_name_hint="softmax"
        )
        for var, each in found.items()
    }

    def changed(block: Any) -> list[Any]:
        return [
            relax.VarBinding(each.var, calls[each.var]) if each.var in calls else each
            for each in block.bindings
        ]

    made = builder.get()
    made.update_func(made.get_global_var(str(name.name_hint)), with_bindings(function, changed))
    return relax.transform.DeadCodeElimination()(made)


def read_sink(graph: Graph, value: Any) -> Sink | None:
    """The parts of a slice of a softmax over rows with one more number; None of other values."""
    if graph.operator(value) != "relax.strided_slice":
        return None
    chances, behind = _through_casts(graph, graph.arguments(value)[0])
    if graph.operator(chances) != "relax.nn.softmax" or not _is_last(graph, chances, "axis"):
        return None
    joined, before = _through_casts(graph, graph.arguments(chances)[0])
    joined = _unshifted(graph, joined)
    if graph.operator(joined) != "relax.concat" or not _is_last(graph, joined, "axis"):
        return None
    parts = getattr(graph.makers[joined].value.args[0], "fields", ())
    widths = [extents for each in parts if (extents := _extents(each)) is not None]
    if len(parts) != 2 or len(widths) != 2:
        return None
    place = next((at for at, each in enumerate(widths) if each[_LAST] == 1), None)
    if place is None or not _takes(graph, value, 1 - place, widths):
        return None
    before = (dtype_of(joined), *before, dtype_of(chances))
    return Sink(parts[1 - place], parts[place], before, (dtype_of(chances), *behind))


def _through_casts(graph: Graph, value: Any) -> tuple[Any, tuple[str, ...]]:
    """What a value casts, and the types that it is cast to in order."""
    types: tuple[str, ...] = ()
    while graph.operator(value) == CAST:
        types = (dtype_of(value), *types)
        (value,) = graph.arguments(value)
    return value, types


def _unshifted(graph: Graph, value: Any) -> Any:
    """What a value subtracts its largest from, which a softmax does itself."""
    if graph.operator(value) != "relax.subtract":
        return value
    whole, largest = graph.makers[value].value.args
    if graph.operator(largest) != "relax.max" or scalar(whole) is not None:
        return value
    attributes = graph.makers[largest].value.attrs
    axes = [int(each) for each in attributes.axis or ()]
    rows = axes in ([_LAST], [len(_extents(whole) or ()) - 1]) and bool(attributes.keepdims)
    return whole if rows and graph.arguments(largest)[0].same_as(whole) else value


def _is_last(graph: Graph, value: Any, name: str) -> bool:
    """Whether an operator works along the last axis."""
    axis = getattr(graph.makers[value].value.attrs, name)
    return axis is not None and int(axis) in (_LAST, len(_extents(value) or ()) - 1)


def _takes(graph: Graph, value: Any, place: int, widths: list[list[int]]) -> bool:
    """Whether a slice takes the first or the second of two parts, and all of it."""
    axes, begins, ends, *steps = (
        [int(getattr(each, "value", each)) for each in given]
        for given in graph.makers[value].value.args[1:]
    )
    rank, whole = len(widths[0]), sum(each[_LAST] for each in widths)
    if axes not in ([_LAST], [rank - 1]) or any(each != [1] for each in steps):
        return False
    first = place * widths[0][_LAST]
    due = range(first, first + widths[place][_LAST])
    return range(*slice(begins[0], ends[0]).indices(whole)) == due


def _extents(value: Any) -> list[int] | None:
    """Extents of a tensor of static shape; None of others."""
    values = getattr(getattr(value.ty, "shape", None), "values", None)
    if values is None or not all(isinstance(each, tirx.IntImm) for each in values):
        return None
    return [int(each) for each in values]


def _weights(of: Sink, scores: te.Tensor, column: te.Tensor) -> te.Tensor:
    """What each score weighs in a softmax of a row and its sink, in float32, rounded in the end."""
    wide = "float64" if "float64" in of.before else "float32"
    *rows, length = scores.shape

    def rounded(value: Any, types: tuple[str, ...]) -> Any:
        for each in types:
            value = value.astype(each)
        return value.astype(wide)

    def along(term: Any, combine: Any) -> te.Tensor:
        at = te.reduce_axis((0, length), name="l")
        return te.compute(rows, lambda *row: combine(term(*row, at), axis=at))

    x = te.compute(scores.shape, lambda *at: rounded(scores(*at), of.before), name="x")
    most = along(x, te.max)
    power = te.compute(scores.shape, lambda *at: tirx.exp(x(*at) - most(*at[:-1])), name="power")
    total = along(power, te.sum)

    def share(*at: Any) -> Any:
        row = at[:-1]
        apart = rounded(column(*row, 0), of.before) - most(*row)
        apart = tirx.Select(apart > _MOST, tirx.const(_MOST, wide), apart)
        weight = power(*at) / (total(*row) + tirx.exp(apart))
        return rounded(weight, of.behind).astype(of.behind[-1])

    return te.compute(scores.shape, share, name="share")
