"""Nodes of a graph as a function of its own, run by torch node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from crossfuse.errors import WorkloadRefused, refuse


@dataclass(frozen=True)
class EagerForm:
    """What some nodes compute.

    Attributes
    ----------
    run : torch.fx.GraphModule
        Of the inputs, then the sizes.
    sizes : tuple[fx.Node, ...]
        Nodes that make the sizes.
    inside : frozenset[fx.Node]
        The nodes that it computes.
    """

    run: fx.GraphModule
    sizes: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]


def eager_form(output: fx.Node, inputs: Sequence[fx.Node]) -> EagerForm:
    """The nodes between inputs and an output.

    Parameters
    ----------
    output : fx.Node
        What to compute.
    inputs : Sequence[fx.Node]
        What it is made of; one may stand there twice.

    Returns
    -------
    EagerForm
        The function.

    Raises
    ------
    WorkloadRefused
        If it needs more than these, and sizes.
    """
    reached = _reached(output, frozenset(inputs))
    order = [each for each in output.graph.nodes if each in reached]
    sizes = [each for each in order if isinstance(each.meta.get("val"), torch.SymInt)]
    graph = fx.Graph()
    images: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate((*inputs, *sizes)):
        images.setdefault(node, graph.placeholder(f"given_{position}"))
    inside = [each for each in order if each not in images]
    for node in inside:
        if node.op != "call_function":
            raise refuse(
                WorkloadRefused,
                "torch-backend",
                output.name,
                found=f"layers that read {node.name} beside their inputs",
                limit="inputs and sizes alone",
                instead="compile with static shapes",
            )
        images[node] = graph.node_copy(node, lambda each: images[each])
    graph.output(images[output])
    run = fx.GraphModule(torch.nn.Module(), graph)
    return EagerForm(run, tuple(sizes), frozenset(inside))


def _reached(output: fx.Node, inputs: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """Nodes that an output depends on, up to inputs and sizes."""
    pending, seen = [output], set()
    while pending:
        node = pending.pop()
        if node in seen or node in inputs:
            continue
        seen.add(node)
        if not isinstance(node.meta.get("val"), torch.SymInt):
            pending += node.all_input_nodes
    return frozenset(seen)
