"""Groups of a torch graph replaced by calls of ``crossfuse::run`` and its like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from operator import getitem
from typing import Any

import sympy
import torch
from torch import fx

from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.workload.dtypes import zeros_behind


@dataclass(frozen=True)
class Call:
    """A call of ``crossfuse::run`` that takes the place of some nodes.

    Of several outputs it is one of ``crossfuse::run_several``.
    """

    #: Names of the nodes whose values it makes.
    outputs: tuple[str, ...]
    #: Names of the nodes that it reads, in the order of the kernel's parameters.
    inputs: tuple[str, ...]
    #: Extents with which the kernel takes them; of more elements where zeros pad its rows.
    shapes: tuple[tuple[int, ...], ...]
    key: str


@dataclass(frozen=True)
class RowsCall:
    """A call of ``crossfuse::run_rows`` that takes the place of some nodes."""

    #: Node whose value it makes.
    output: fx.Node
    #: Tensors in the order of the kernels' parameters.
    inputs: tuple[fx.Node, ...]
    #: Sizes that the eager form reads.
    sizes: tuple[fx.Node, ...]
    key: str


RESHAPE = torch.ops.aten.reshape.default
_CONTIGUOUS = torch.ops.aten.clone.default
_PERMUTE = torch.ops.aten.permute.default
_PAD = torch.ops.aten.constant_pad_nd.default
#: The runtime refuses arguments that begin elsewhere.
_LOAD_BYTES = 16


def rewrite(module: fx.GraphModule, calls: Sequence[Call], rows: Sequence[RowsCall] = ()) -> None:
    """Replace groups by calls, in place: `calls` of static shapes, `rows` of symbolic rows.

    Each call is in terms of the graph as it is before all of them.
    """
    graph = module.graph
    nodes = {each.name: each for each in graph.nodes}
    for one in rows:
        with graph.inserting_before(one.output):
            # An input may be what another kernel makes by now.
            given = [contiguous(graph, nodes[each.name]) for each in one.inputs]
            run = torch.ops.crossfuse.run_rows.default
            result = inserted(graph, run, given, list(one.sizes), one.key)
            result = _shaped_as(graph, result, one.output, one.inputs)
            nodes[one.output.name] = _in_place(graph, result, one.output)
    for call in calls:
        made = [nodes[each] for each in call.outputs]
        with graph.inserting_before(_first(graph, made)):
            given = [
                _input(graph, nodes[each], shape)
                for each, shape in zip(call.inputs, call.shapes, strict=True)
            ]
            results = _called(graph, given, call)
            for name, node, flat in zip(call.outputs, made, results, strict=True):
                result = _reshaped(graph, flat, tuple(node.meta["val"].shape))
                # Or what reads it next would keep alive what computed it before.
                nodes[name] = _in_place(graph, result, node)
    finish(module)


def _first(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    if len(nodes) == 1:
        return nodes[0]
    return next(each for each in graph.nodes if each in nodes)


def _called(graph: fx.Graph, given: list[fx.Node], call: Call) -> list[fx.Node]:
    """What a kernel makes, one node for each of its outputs."""
    if len(call.outputs) == 1:
        return [inserted(graph, torch.ops.crossfuse.run.default, given, call.key)]
    every = inserted(graph, torch.ops.crossfuse.run_several.default, given, call.key)
    return [inserted(graph, getitem, every, place) for place in range(len(call.outputs))]


def _in_place(graph: fx.Graph, result: fx.Node, node: fx.Node) -> fx.Node:
    """Put a result, in the strides of a node, in the place of the node."""
    result = laid_out(graph, result, node.meta["val"])
    node.replace_all_uses_with(result)
    return result


def finish(module: fx.GraphModule) -> None:
    """Remove dead nodes, and compute what is made of frozen weights alone."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    if is_frozen(module):
        from torch._inductor.constant_folding import constant_fold
        from torch._inductor.freezing_utils import enter_freezing

        with enter_freezing():  # inductor's cache then asks for no values of what is made
            constant_fold(module)


def is_frozen(module: fx.GraphModule) -> bool:
    """Whether inductor's ``freezing`` made constants of a graph's weights, as its user asked."""
    return bool(getattr(module, "_has_frozen_params", False))


def _input(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """Give a tensor the form that kernels take: row-major, of the function's extents.

    What lies otherwise is copied by an operator of the graph, which whoever compiles the rest sees.
    """
    zeros = zeros_behind(shape, prod(node.meta["val"].shape))
    short = (*shape[:-1], shape[-1] - zeros) if zeros else shape
    given = _reshaped(graph, contiguous(graph, node), short)
    return inserted(graph, _PAD, given, [0, zeros]) if zeros else given


def contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node itself if kernels take its tensor as it lies, else a copy that they take."""
    if lies_as_taken(node.meta["val"]):
        return node
    return inserted(graph, _CONTIGUOUS, node, memory_format=torch.contiguous_format)


def lies_as_taken(value: torch.Tensor) -> bool:
    """Whether a tensor is row-major and begins where kernels may load 16 bytes at once.

    One that is part of another may begin elsewhere; of symbolic places nothing is asked.
    """
    start = value.storage_offset()
    odd = isinstance(start, int) and start * value.element_size() % _LOAD_BYTES != 0
    return value.is_contiguous() and not odd


def laid_out(graph: fx.Graph, result: fx.Node, before: torch.Tensor) -> fx.Node:
    """Give a row-major result the strides that the value had: views of it rely on them."""
    if before.is_contiguous():
        return result
    order = sorted(range(before.dim()), key=before.stride, reverse=True)
    back = sorted(range(before.dim()), key=order.__getitem__)
    turned = inserted(graph, _PERMUTE, result, order)
    return inserted(graph, _PERMUTE, contiguous(graph, turned), back)


def _reshaped(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    before = tuple(node.meta["val"].shape)
    assert prod(before) == prod(shape)
    return node if before == tuple(shape) else inserted(graph, RESHAPE, node, list(shape))


def inserted(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of an operator, with the fake tensor that later passes expect of it."""
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
    with _mode(values):
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _mode(values: Any) -> Any:
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    mode = detect_fake_mode([each for each in tree_leaves(values) if torch.is_tensor(each)])
    assert mode is not None
    return mode


def extent(value: Any) -> sympy.Expr:
    """A size as an expression of symbols."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))


def _shaped_as(
    graph: fx.Graph, result: fx.Node, node: fx.Node, inputs: Sequence[fx.Node]
) -> fx.Node:
    """Give a result the shape of a node, with sizes that other nodes make."""
    shape = tuple(map(extent, node.meta["val"].shape))
    if shape == tuple(map(extent, result.meta["val"].shape)):
        return result
    return inserted(graph, RESHAPE, result, [_size(graph, each, node, inputs) for each in shape])


def _size(graph: fx.Graph, size: Any, before: fx.Node, inputs: Sequence[fx.Node]) -> Any:
    """A size as a number, or as a node that stands in front of another one."""
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
