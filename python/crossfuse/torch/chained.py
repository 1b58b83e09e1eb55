"""Which calls of kernels in a graph of torch start early, see `crossfuse.relax.calls`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from crossfuse.relax.calls import KernelCall

if TYPE_CHECKING:
    from crossfuse.relax.replace import Replacement

#: Nodes whose values are there before the graph is called.
_GIVEN = ("placeholder", "get_attr")


class Starts:
    """How calls that will replace groups of a graph start, as they are found.

    `nodes` are those of the variables in replacements. Without `early` no call follows another one.
    """

    def __init__(self, graph: fx.Graph, nodes: Mapping[Any, fx.Node], early: bool) -> None:
        self._graph = graph
        self._nodes = nodes
        self._early = early
        self._made: set[fx.Node] = set()

    def calls(self, replacements: Sequence[Replacement]) -> list[KernelCall]:
        """How further calls start, which may follow each other and those before."""
        if not self._early:
            return [KernelCall(each.function) for each in replacements]
        self._made |= {self._nodes[made] for each in replacements for made in each.outputs}
        behind, read_only = _behind(self._graph, self._made), _read_only(self._graph)

        def call(found: Replacement) -> KernelCall:
            given = [self._nodes[each] for each in found.inputs]
            # What has other extents or strides in the graph may be a copy that the graph makes.
            constant = frozenset(
                place
                for place, (node, shape) in enumerate(zip(given, found.shapes, strict=True))
                if node in read_only and _is_taken_as_it_is(node, shape)
            )
            return KernelCall(found.function, any(each in behind for each in given), constant)

        return [call(each) for each in replacements]


def _behind(graph: fx.Graph, made: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that are kernels' results in each call of the graph, or need some.

    What needs no input of the graph may be computed once, when it is compiled.
    """
    moving: set[fx.Node] = set()
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(each in moving for each in node.all_input_nodes):
            moving.add(node)
        needs = any(each in behind for each in node.all_input_nodes)
        if needs or (node in made and node in moving):
            behind.add(node)
    return behind


def _read_only(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are given to a graph, and that nothing in it writes."""
    written = {base for node in graph.nodes for each in _written(node) for base in _bases(each)}
    return {each for each in graph.nodes if each.op in _GIVEN and each not in written}


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes whose tensors a node may write: all that it is given, if it does not say which."""
    if node.op in (*_GIVEN, "output"):
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        yield from () if node.target is getitem else node.all_input_nodes
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        found: list[fx.Node] = []
        fx.node.map_arg(given, found.append)
        yield from found


def _bases(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and those that it may be a view of."""
    yield node
    is_view = True
    if isinstance(node.target, torch._ops.OpOverload):
        is_view = any(each.alias_info is not None for each in node.target._schema.returns)
    for each in node.all_input_nodes if is_view else ():
        yield from _bases(each)


def _is_taken_as_it_is(node: fx.Node, shape: Sequence[Any]) -> bool:
    value = node.meta["val"]
    return tuple(value.shape) == tuple(shape) and bool(value.is_contiguous())
