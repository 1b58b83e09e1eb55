"""What torch computes without us of a group: nodes of a graph, as another process can run them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.measure.timer import Timer
from crossfuse.measure.way import GRAPH, Given, Way
from crossfuse.relax.measured import Measuring
from crossfuse.torch.graph_key import Untold, node_words

# Nodes of a graph as a function of its own, run by torch node by node.


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


@dataclass(frozen=True)
class SeparateGraph:
    """Nodes of a graph.

    Attributes
    ----------
    run : torch.fx.GraphModule
        Of the inputs.
    given : tuple[Given, ...]
        These, with their strides.
    mode : str | None
        How torch compiles it; None: not at all.
    words : str
        The nodes in words.
    """

    run: fx.GraphModule
    given: tuple[Given, ...]
    mode: str | None
    words: str

    @property
    def text(self) -> str:
        """All that says what it is."""
        return f"{self.words}\n{self.given}\n{self.mode}\ntorch {torch.__version__}"

    def write(self, path: Path) -> Way:
        """See `crossfuse.relax.measured.Separate`."""
        # Nodes carry tensors of this trace, which are no part of what they compute.
        for node in self.run.graph.nodes:
            node.meta.clear()
        torch.save(self.run, path)
        return Way(GRAPH, str(path), self.given, self.mode)


@dataclass(frozen=True)
class Timing:
    """How groups of graphs are timed.

    Attributes
    ----------
    timer : Timer
        Times them.
    mode : str | None
        How torch compiles what is left; None: nobody does.
    """

    timer: Timer
    mode: str | None

    def of(self, nodes: Mapping[Any, fx.Node]) -> Measuring:
        """The same for the groups of a translated graph.

        Parameters
        ----------
        nodes : Mapping[Var, fx.Node]
            Of the graph, by the variables of its translation.
        """

        def separate(
            output: Any, inputs: Sequence[Any], cold: Sequence[bool]
        ) -> SeparateGraph | None:
            try:
                given = [nodes[each] for each in inputs]
                return separate_graph(nodes[output], given, cold, self.mode)
            except (KeyError, RefusedError, Untold):
                return None

        return Measuring(self.timer, separate)


def separate_graph(
    output: fx.Node, inputs: Sequence[fx.Node], cold: Sequence[bool], mode: str | None
) -> SeparateGraph:
    """The nodes between inputs and an output.

    Parameters
    ----------
    output, inputs
        See `crossfuse.torch.separate.eager_form`; of static shapes.
    cold : Sequence[bool]
        Which inputs are read from memory.
    mode : str | None
        See `Timing`.

    Raises
    ------
    WorkloadRefused, Untold
        If it needs more than these, or has no words.
    """
    form = eager_form(output, inputs)
    words = _words(inputs, [each for each in output.graph.nodes if each in form.inside])
    given = tuple(
        Given(
            tuple(map(int, value.shape)),
            str(value.dtype).removeprefix("torch."),
            tuple(map(int, value.stride())),
            each,
        )
        for value, each in zip((node.meta["val"] for node in inputs), cold, strict=True)
    )
    return SeparateGraph(form.run, given, mode, words)


def _words(inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> str:
    """Nodes in words, numbered in order: equal layers of a model have equal ones."""
    numbers = {each.name: str(at) for at, each in enumerate(dict.fromkeys((*inputs, *nodes)))}
    lines = (node_words(each, "val").partition(" = ")[2] for each in nodes)
    places = [numbers[each.name] for each in inputs]
    return "\n".join(
        (
            f"of {places}",
            *(re.sub(r"%(\w+)", lambda name: f"%{numbers[name[1]]}", line) for line in lines),
        )
    )
