"""Groups of a torch graph replaced by calls of ``crossfuse::run``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx
from tvm.ir import Var

from crossfuse.relax.chains.replace import Replacement

_RESHAPE = torch.ops.aten.reshape.default
_CONTIGUOUS = torch.ops.aten.clone.default


def rewrite(
    module: fx.GraphModule,
    nodes: Mapping[Var, fx.Node],
    replacements: Mapping[Var, Replacement],
    keys: Mapping[Any, str],
) -> None:
    """Replace groups in place.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of aten operators.
    nodes : Mapping[Var, fx.Node]
        Its nodes by the variables of its translation.
    replacements : Mapping[Var, Replacement]
        By the variables that they make.
    keys : Mapping[GlobalVar, str]
        Keys of ``crossfuse::run`` by function.
    """
    graph = module.graph
    for variable, found in replacements.items():
        node = nodes[variable]
        with graph.inserting_before(node):
            given = [
                _input(graph, nodes[each], shape)
                for each, shape in zip(found.inputs, found.shapes, strict=True)
            ]
            result = _call(graph, torch.ops.crossfuse.run.default, given, keys[found.function])
            result = _reshaped(graph, result, tuple(node.meta["val"].shape))
        node.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _input(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """A tensor as kernels take them: row-major, of the function's extents.

    What lies otherwise is copied by an operator of the graph, which whoever compiles the rest sees.
    """
    if not node.meta["val"].is_contiguous():
        node = _call(graph, _CONTIGUOUS, node, memory_format=torch.contiguous_format)
    return _reshaped(graph, node, shape)


def _reshaped(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    before = tuple(node.meta["val"].shape)
    assert prod(before) == prod(shape)
    return node if before == tuple(shape) else _call(graph, _RESHAPE, node, list(shape))


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node with the fake tensor that later passes expect of it."""
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
    with _mode(values):
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _mode(values: Any) -> Any:
    """The fake mode of some fake tensors."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    mode = detect_fake_mode([each for each in tree_leaves(values) if torch.is_tensor(each)])
    assert mode is not None
    return mode
