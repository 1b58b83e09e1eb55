"""Groups of a graph as graphs of their own, which torch runs without kernels of ours."""

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
from crossfuse.torch.concrete import concrete
from crossfuse.torch.graph_key import Untold, node_words
from crossfuse.torch.translate import Translation


@dataclass(frozen=True)
class EagerForm:
    """Nodes of a graph as a function of its own, which torch runs node by node."""

    #: Takes the inputs, then the sizes.
    run: fx.GraphModule
    #: Nodes that make the sizes.
    sizes: tuple[fx.Node, ...]
    #: The nodes that it computes.
    inside: frozenset[fx.Node]


def eager_form(output: fx.Node, inputs: Sequence[fx.Node]) -> EagerForm:
    """Extract the nodes between inputs and an output as a function.

    An input may stand there twice. `WorkloadRefused` is raised if the nodes read more than inputs
    and sizes.
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
    """A group as torch computes it, which another process times against kernels of ours."""

    #: Takes the inputs.
    run: fx.GraphModule
    #: The inputs, with their strides.
    given: tuple[Given, ...]
    #: How torch compiles it; None does not compile it.
    mode: str | None
    #: The nodes in words, equal for equal layers.
    words: str

    @property
    def text(self) -> str:
        """All that identifies it: nodes, inputs, mode, and torch's release."""
        return f"{self.words}\n{self.given}\n{self.mode}\ntorch {torch.__version__}"

    def write(self, path: Path) -> Way:
        """Write the graph to a file, see `crossfuse.relax.measured.Separate`."""
        # Nodes carry tensors of this trace, which are no part of what they compute.
        for node in self.run.graph.nodes:
            node.meta.clear()
        torch.save(self.run, path)
        return Way(GRAPH, str(path), self.given, self.mode)


@dataclass(frozen=True)
class Timing:
    """How groups of a graph are timed: the timer, and how torch's own side is compiled."""

    timer: Timer
    #: How torch compiles what is left; None where nobody does.
    mode: str | None

    def of(self, graph: fx.Graph, translation: Translation) -> Measuring:
        """Bind it to a graph and its translation."""
        symbols = {variable: each for each, variable in translation.symbols.items()}

        def separate(
            output: Any, inputs: Sequence[Any], cold: Sequence[bool], sizes: Mapping[Any, int]
        ) -> SeparateGraph | None:
            try:
                nodes = [translation.nodes[each] for each in (output, *inputs)]
                if sizes:
                    known = {symbols[each]: size for each, size in sizes.items()}
                    image = concrete(graph, known)
                    nodes = [image[each] for each in nodes]
                return separate_graph(nodes[0], nodes[1:], cold, self.mode)
            except (KeyError, RefusedError, Untold):
                return None

        return Measuring(self.timer, separate)


def separate_graph(
    output: fx.Node, inputs: Sequence[fx.Node], cold: Sequence[bool], mode: str | None
) -> SeparateGraph:
    """Extract the nodes between inputs and an output, of static shapes, to be timed.

    `cold` says which inputs are read from memory; `mode` is that of `Timing`. `WorkloadRefused` is
    raised if the nodes read more than the inputs, `Untold` if one has no words.
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
    """Describe nodes, numbered in order, so that equal layers of a model have equal words."""
    numbers = {each.name: str(at) for at, each in enumerate(dict.fromkeys((*inputs, *nodes)))}
    lines = (node_words(each, "val").partition(" = ")[2] for each in nodes)
    places = [numbers[each.name] for each in inputs]
    return "\n".join(
        (
            f"of {places}",
            *(re.sub(r"%(\w+)", lambda name: f"%{numbers[name[1]]}", line) for line in lines),
        )
    )
