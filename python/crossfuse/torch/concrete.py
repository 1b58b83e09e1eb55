"""Symbols in the shapes of torch's graphs, and graphs at some sizes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

#: Operators whose numbers are extents of what they make, and say nothing about its elements.
OF_SHAPE = frozenset({"view.default", "reshape.default", "_unsafe_view.default", "expand.default"})
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def extent(value: Any) -> sympy.Expr:
    """A size as an expression of symbols."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def is_size(node: fx.Node) -> bool:
    """Whether what a node makes is a number that may differ from run to run."""
    return isinstance(node.meta.get("val"), SYMBOLS)


def elsewhere(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes of a GPU's graph that make a tensor on the CPU, which no kernel reads.

    Operators of torch read it from there if it has no axes.
    """
    values = {each: each.meta.get("val") for each in graph.nodes}
    kinds = {k: v.device.type for k, v in values.items() if isinstance(v, torch.Tensor)}
    if set(kinds.values()) <= {"cpu"}:
        return frozenset()
    return frozenset(each for each, kind in kinds.items() if kind == "cpu")


def concrete(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int]) -> Mapping[fx.Node, Any]:
    """Copy a graph with values for symbols: its nodes in the copy, and numbers for sizes.

    Nodes carry ``meta["val"]``. What depends on symbols without a value stays symbolic.
    """
    made = fx.Graph()
    images: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if is_size(node):
            images[node] = _number(value, sizes)
            continue
        images[node] = made.node_copy(node, lambda each: images[each])
        if isinstance(value, torch.Tensor):
            images[node].meta["val"] = _tensor(value, sizes)
    return images


def _number(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """A size at some values of symbols; what is still symbolic, or no integer, stays."""
    if not isinstance(value, torch.SymInt):
        return value
    number = sympy.sympify(extent(value).xreplace(dict(sizes)))
    return int(number) if number.is_Integer else value


def _tensor(value: torch.Tensor, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    shape, stride = ([_number(each, sizes) for each in x] for x in (value.shape, value.stride()))
    if value.layout != torch.strided or not all(
        isinstance(each, int) for each in (*shape, *stride)
    ):
        return value
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
