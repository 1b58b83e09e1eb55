"""What became of a graph, kept by a text of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from crossfuse.cache import Entry, shelf
from crossfuse.cache.keys import content_key
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.schema import read
from crossfuse.torch.graph_key import Untold, environment, node_words
from crossfuse.torch.kernels import KeptKernel, offer_kept
from crossfuse.torch.report import Report
from crossfuse.torch.rewrite import Call, rewrite

if TYPE_CHECKING:
    from crossfuse.relax.chains.replace import Replacement

# What a pass made of a graph of torch.


@dataclass(frozen=True)
class Step:
    """Groups that became kernels, in a form that another process can repeat.

    Attributes
    ----------
    kernels : tuple[KeptKernel, ...]
        The kernels.
    calls : tuple[Call, ...]
        What takes the place of which nodes.
    """

    kernels: tuple[KeptKernel, ...] = ()
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Fused:
    """What became of a graph.

    Attributes
    ----------
    outcomes : tuple[ChainOutcome, ...]
        Of each group that was found.
    step : Step
        What was replaced.
    untranslated : tuple[str, ...]
        Operators that TVM does not know.
    """

    outcomes: tuple[ChainOutcome, ...] = ()
    step: Step = Step()
    untranslated: tuple[str, ...] = ()


def replaced(
    module: fx.GraphModule,
    nodes: Mapping[Any, fx.Node],
    replacements: Mapping[Any, Replacement],
    kernels: Mapping[Any, KeptKernel],
) -> Step:
    """Replace groups in place.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of aten operators.
    nodes : Mapping[Var, fx.Node]
        Its nodes by the variables of its translation.
    replacements : Mapping[Var, Replacement]
        By the variables that they make.
    kernels : Mapping[GlobalVar, KeptKernel]
        By function.

    Returns
    -------
    Step
        What was done.
    """
    calls = tuple(
        Call(
            nodes[variable].name,
            tuple(nodes[each].name for each in found.inputs),
            tuple(tuple(map(int, each)) for each in found.shapes),
            kernels[found.function].key,
        )
        for variable, found in replacements.items()
    )
    rewrite(module, calls)
    return Step(tuple(kernels.values()), calls)


# Graphs that were fused before: what became of them, from the cache, without TVM.
#
# A graph is known by all that decides what becomes of it: its operators, shapes, strides, types and
# constants, but not the values of tensors; the options; the device; the releases of torch, TVM and
# nvcc; and this package's own files. Where any of it cannot be told in words, the graph has no key
# and is worked out again.

_KIND = "graph"


@dataclass(frozen=True)
class Record:
    """What became of a graph, as another process can repeat it.

    Attributes
    ----------
    report : Report
        What is reported of it.
    steps : tuple[Step, ...]
        What was replaced, in order.
    """

    report: Report
    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[KeptKernel, ...]:
        """Kernels that the graph calls."""
        return tuple(each for step in self.steps for each in step.kernels)

    @property
    def label(self) -> str:
        """What it is, for people."""
        names = ", ".join(dict.fromkeys(self.report.fused)) or "no kernels"
        return f"graph of {len(self.report.outcomes)} groups: {names}"

    def to_dict(self) -> dict[str, Any]:
        """Values of JSON."""
        return asdict(self)


def graph_key(graph: fx.Graph, target: Device, options: Sequence[Any]) -> str:
    """What a graph is known by.

    Parameters
    ----------
    graph : torch.fx.Graph
        Of aten operators; its nodes carry ``meta["val"]``.
    target : Device
        What kernels are for.
    options : Sequence[Any]
        What else decides which groups become kernels, told apart by ``repr``.

    Returns
    -------
    str
        The key; empty for graphs of symbolic shapes and those with parts that have no words.

    Raises
    ------
    EnvironmentRefused
        Without nvcc, whose release is part of it.
    """
    try:
        lines = [node_words(each, "val") for each in graph.nodes]
    except Untold:
        return ""
    return content_key(target, _KIND, *environment(), *map(repr, options), "\n".join(lines))


def recall(module: fx.GraphModule, key: str) -> Record | None:
    """Replace the groups of a graph as it was done before.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The graph, which is changed in place.
    key : str
        See `graph_key`.

    Returns
    -------
    Record | None
        What was done; None, and no change, where the graph or one of its kernels is not kept.
    """
    record = shelf(_KIND).read(key, lambda entry: read(Record, entry.data))
    try:
        if record is None or not _fits(record, module) or not offer_kept(record.kernels):
            return None
    except RefusedError:
        return None
    for step in record.steps:
        if step.calls:
            rewrite(module, step.calls)
    return record


def remember(key: str, record: Record) -> None:
    """Keep what became of a graph.

    Parameters
    ----------
    key : str
        See `graph_key`, of the graph as it was.
    record : Record
        What became of it; all of its kernels are kept.
    """
    data = json.dumps(record.to_dict()).encode()
    shelf(_KIND).write(key, Entry(data, {"label": record.label}))


def _fits(record: Record, module: fx.GraphModule) -> bool:
    """Whether the calls of a record name nodes of a graph, and kernels of their own."""
    names = {each.name for each in module.graph.nodes}
    keys = {each.key for each in record.kernels}
    calls = [each for step in record.steps for each in step.calls]
    return all(
        {each.output, *each.inputs} <= names
        and each.key in keys
        and len(each.inputs) == len(each.shapes)
        for each in calls
    )
