"""Groups of a graph as graphs of their own, which torch runs without kernels of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.measure.job import GRAPH, Given, Way
from crossfuse.measure.timer import Timer
from crossfuse.relax.choice import Measuring, Separate
from crossfuse.torch.graph_cache import Untold, node_words
from crossfuse.torch.rewrite import extent
from crossfuse.torch.translate import Translation, is_size


@dataclass(frozen=True)
class EagerForm:
    """Nodes of a graph as a function of its own, which torch runs node by node."""

    #: Takes the inputs, then the sizes.
    run: fx.GraphModule
    #: Nodes that make the sizes.
    sizes: tuple[fx.Node, ...]
    #: The nodes that it computes.
    inside: frozenset[fx.Node]


def eager_form(outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> EagerForm:
    """Extract the nodes between inputs and outputs as a function, of several outputs of a tuple.

    An input may stand there twice. `WorkloadRefused` is raised if the nodes read more than inputs
    and sizes.
    """
    reached = _reached(outputs, frozenset(inputs))
    order = [each for each in outputs[0].graph.nodes if each in reached]
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
                outputs[-1].name,
                found=f"layers that read {node.name} beside their inputs",
                limit="inputs and sizes alone",
                instead="compile with static shapes",
            )
        images[node] = graph.node_copy(node, lambda each: images[each])
    made = tuple(images[each] for each in outputs)
    graph.output(made if len(made) > 1 else made[0])
    run = fx.GraphModule(torch.nn.Module(), graph)
    return EagerForm(run, tuple(sizes), frozenset(inside))


def _reached(outputs: Sequence[fx.Node], inputs: frozenset[fx.Node]) -> frozenset[fx.Node]:
    pending, seen = [*outputs], set()
    while pending:
        node = pending.pop()
        if node in seen or node in inputs:
            continue
        seen.add(node)
        if not isinstance(node.meta.get("val"), torch.SymInt):
            pending += node.all_input_nodes
    return frozenset(seen)


def measuring(
    timer: Timer, mode: str | None, graph: fx.Graph, translation: Translation
) -> Measuring:
    """How groups of a graph are timed beside torch, which compiles them as `mode` says.

    A `mode` of None does not compile them.
    """
    symbols = {variable: each for each, variable in translation.symbols.items()}

    def separate(
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        cold: Sequence[bool],
        sizes: Mapping[Any, int],
    ) -> Separate | None:
        try:
            nodes = [translation.nodes[each] for each in (*outputs, *inputs)]
            if sizes:
                image = _concrete(graph, {symbols[each]: size for each, size in sizes.items()})
                nodes = [image[each] for each in nodes]
            return _separate(nodes[: len(outputs)], nodes[len(outputs) :], cold, mode)
        except (KeyError, RefusedError, Untold):
            return None

    return Measuring(timer, separate)


def _separate(
    outputs: Sequence[fx.Node], inputs: Sequence[fx.Node], cold: Sequence[bool], mode: str | None
) -> Separate:
    """The nodes between inputs and outputs, of static shapes, to be timed by another process.

    `WorkloadRefused` is raised if the nodes read more than the inputs, `Untold` if one has no
    words.
    """
    form = eager_form(outputs, inputs)
    words = _words(inputs, [each for each in outputs[0].graph.nodes if each in form.inside])
    given = tuple(
        Given(
            tuple(map(int, value.shape)),
            str(value.dtype).removeprefix("torch."),
            tuple(map(int, value.stride())),
            each,
        )
        for value, each in zip((node.meta["val"] for node in inputs), cold, strict=True)
    )

    def write(path: Path) -> Way:
        # Nodes carry tensors of this trace, which are no part of what they compute.
        for node in form.run.graph.nodes:
            node.meta.clear()
        torch.save(form.run, path)
        return Way(GRAPH, str(path), given, mode)

    return Separate(f"{words}\n{given}\n{mode}\ntorch {torch.__version__}", write)


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


def _concrete(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int]) -> Mapping[fx.Node, Any]:
    """Copy a graph with values for symbols: its nodes in the copy, and numbers for sizes.

    Nodes carry ``meta["val"]``. What depends on symbols without a value stays symbolic.
    """
    made = fx.Graph()
    images: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if is_size(node):
            images[node] = _size_at(value, sizes)
            continue
        images[node] = made.node_copy(node, lambda each: images[each])
        if isinstance(value, torch.Tensor):
            images[node].meta["val"] = _tensor_at(value, sizes)
    return images


def _size_at(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """A size at some values of symbols; what is still symbolic, or no integer, stays."""
    if not isinstance(value, torch.SymInt):
        return value
    number = sympy.sympify(extent(value).xreplace(dict(sizes)))
    return int(number) if number.is_Integer else value


def _tensor_at(value: torch.Tensor, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    shape, stride = ([_size_at(each, sizes) for each in x] for x in (value.shape, value.stride()))
    if value.layout != torch.strided or not all(
        isinstance(each, int) for each in (*shape, *stride)
    ):
        return value
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
