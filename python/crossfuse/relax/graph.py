"""The Relax function of a model as a plain dataflow graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, Var

from crossfuse.relax.operators import (
    CAST,
    PRODUCT,
    RESHAPES,
    TRANSPOSE,
    check_elementwise,
    dtype_of,
    is_tensor,
    operator,
    refused,
    shape_of,
)


@dataclass(frozen=True)
class Graph:
    """Bindings of one Relax function with one result."""

    params: tuple[Var, ...]
    #: The call that each bound variable stands for, in the order of binding.
    calls: Mapping[Var, Call]
    #: The result.
    output: Var

    def operator(self, value: Any) -> str:
        """Name of the operator that makes a value, or ``""`` for parameters and constants."""
        return operator(self.calls[value]) if value in self.calls else ""

    def arguments(self, value: Any) -> list[Any]:
        """Tensors that a bound variable is made of."""
        return [argument for argument in self.calls[value].args if is_tensor(argument)]

    def products(self) -> list[Var]:
        """Variables bound to matrix products, in order."""
        return [v for v in self.calls if self.operator(v) == PRODUCT]

    def reach(self, target: Any, stops: Iterable[Any]) -> tuple[list[Var], list[Any]]:
        """The bindings that make a value, not looking behind `stops`, and the leaves they read.

        The bound variables up to `target` are in the order of binding; the leaves, which are stops,
        parameters and constants, in the order of first use.
        """
        stops = set(stops)
        pending, seen = [target], set()
        while pending:
            value = pending.pop()
            if value in self.calls and value not in stops and value not in seen:
                seen.add(value)
                pending += self.arguments(value)
        inner = [value for value in self.calls if value in seen]
        used = [a for v in inner for a in self.arguments(v)] if inner else [target]
        leaves: list[Any] = []
        for value in used:
            if value not in seen and not any(value.same_as(leaf) for leaf in leaves):
                leaves.append(value)
        return inner, leaves


def read_graph(mod: tvm.IRModule) -> Graph:
    """Read the main function of a model, or its only Relax function.

    Dead and repeated bindings are dropped. Refused are control flow, several results, dynamic
    shapes, float64, and operators that are neither matrix products nor element-wise, casts,
    transpositions and reshapes.
    """
    function = _main(mod)
    calls: dict[Var, Call] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            calls[binding.var] = _bound(binding)
    graph = Graph(tuple(function.params), calls, function.body.body)
    _check_values(graph)
    return graph


def _bound(binding: relax.Binding) -> Call:
    """The call of a binding, which must have one tensor as its result."""
    if not isinstance(binding, relax.VarBinding):
        found, advice = f"a {type(binding).__name__}", "export without shape assertions"
        raise refused("main", found, "static shapes", advice)
    if isinstance(binding.value, relax.Tuple):
        raise refused("main", "several results", "one output", "return one tensor")
    shape_of(binding.var, operator(binding.value))
    return binding.value


def _main(mod: tvm.IRModule) -> relax.Function:
    functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    name = "main" if "main" in functions else next(iter(functions), "")
    if not name or (name != "main" and len(functions) > 1):
        found = ", ".join(functions) or "no Relax function"
        raise refused("module", found, "one Relax function, or main", "name the function main")
    clean = tvm.transform.Sequential(
        [
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination([name]),
        ]
    )
    return clean(mod)[name]


def _check_values(graph: Graph) -> None:
    if graph.output not in graph.calls:
        shape_of(graph.output, "the output")
        raise refused("main", "no operator", "two matrix products", "leave the model as it is")
    for variable, call in graph.calls.items():
        name = operator(call)
        if name not in {PRODUCT, CAST, TRANSPOSE, *RESHAPES}:
            check_elementwise(call)
        for value in (variable, *graph.arguments(variable)):
            if dtype_of(value) == "float64":
                advice = "convert the model to float32 or less"
                raise refused(name, "float64", "at most float32, which sums are kept in", advice)
