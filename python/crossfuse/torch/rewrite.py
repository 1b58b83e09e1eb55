"""Groups of a torch graph replaced by calls of ``crossfuse::run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import fx
from tvm.ir import Var

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.relax.chains.replace import Replacement
from crossfuse.torch.concrete import extent


@dataclass(frozen=True)
class RowsCall:
    """A call of ``crossfuse::run_rows`` that takes the place of some nodes.

    Attributes
    ----------
    output : fx.Node
        Whose value it makes.
    inputs : tuple[fx.Node, ...]
        Tensors in the order of the kernels' parameters.
    sizes : tuple[fx.Node, ...]
        Sizes that the eager form reads.
    key : str
        Of the kernels.
    """

    output: fx.Node
    inputs: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]
    key: str


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
    _finish(module)


def rewrite_rows(module: fx.GraphModule, calls: Sequence[RowsCall]) -> None:
    """Replace groups of symbolic shapes in place.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of aten operators.
    calls : Sequence[RowsCall]
        What takes their place.
    """
    graph = module.graph
    for call in calls:
        node = call.output
        with graph.inserting_before(node):
            given = [_contiguous(graph, each) for each in call.inputs]
            run = torch.ops.crossfuse.run_rows.default
            result = _call(graph, run, given, list(call.sizes), call.key)
            result = _shaped_as(graph, result, node, call.inputs)
        node.replace_all_uses_with(result)
    _finish(module)


def _finish(module: fx.GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _shaped_as(
    graph: fx.Graph, result: fx.Node, node: fx.Node, inputs: Sequence[fx.Node]
) -> fx.Node:
    """A result in the shape of a node, whose sizes other nodes have."""
    shape = tuple(map(extent, node.meta["val"].shape))
    if shape == tuple(map(extent, result.meta["val"].shape)):
        return result
    return _call(graph, _RESHAPE, result, [_size(graph, each, node, inputs) for each in shape])


def _size(graph: fx.Graph, size: Any, before: fx.Node, inputs: Sequence[fx.Node]) -> Any:
    """A size as a number, or as a node in front of another one."""
    if size.is_Integer:
        return int(size)
    for each in takewhile(lambda each: each is not before, graph.nodes):
        value = each.meta.get("val")
        if isinstance(value, torch.SymInt) and extent(value) == size:
            return each
    for each in inputs:
        for axis, value in enumerate(each.meta["val"].shape):
            if extent(value) == size:
                return _call(graph, torch.ops.aten.sym_size.int, each, axis)
    raise refuse(
        WorkloadRefused,
        "torch-backend",
        before.name,
        found=f"the size {size}",
        limit="sizes that the graph or the inputs of the layers have",
        instead="reshape the output outside of the graph",
    )


def _input(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """A tensor as kernels take them: row-major, of the function's extents.

    What lies otherwise is copied by an operator of the graph, which whoever compiles the rest sees.
    """
    return _reshaped(graph, _contiguous(graph, node), shape)


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.meta["val"].is_contiguous():
        return node
    return _call(graph, _CONTIGUOUS, node, memory_format=torch.contiguous_format)


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
