"""Groups of symbolic rows replaced by calls of ``crossfuse::run_rows``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.torch.concrete import extent
from crossfuse.torch.rewrite import RESHAPE, contiguous, finish, inserted, laid_out


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
            given = [contiguous(graph, each) for each in call.inputs]
            run = torch.ops.crossfuse.run_rows.default
            result = inserted(graph, run, given, list(call.sizes), call.key)
            result = _shaped_as(graph, result, node, call.inputs)
            result = laid_out(graph, result, node.meta["val"])
        node.replace_all_uses_with(result)
    finish(module)


def _shaped_as(
    graph: fx.Graph, result: fx.Node, node: fx.Node, inputs: Sequence[fx.Node]
) -> fx.Node:
    """A result in the shape of a node, whose sizes other nodes have."""
    shape = tuple(map(extent, node.meta["val"].shape))
    if shape == tuple(map(extent, result.meta["val"].shape)):
        return result
    return inserted(graph, RESHAPE, result, [_size(graph, each, node, inputs) for each in shape])


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
                return inserted(graph, torch.ops.aten.sym_size.int, each, axis)
    raise refuse(
        WorkloadRefused,
        "torch-backend",
        before.name,
        found=f"the size {size}",
        limit="sizes that the graph or the inputs of the layers have",
        instead="reshape the output outside of the graph",
    )
