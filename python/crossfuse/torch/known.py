"""Graphs that were fused before: what became of them, from the cache, without TVM.

A graph is known by all that decides what becomes of it: its operators, shapes, strides, types and
constants, but not the values of tensors; the options; the device; the releases of torch, TVM and
nvcc; and this package's own files. Where any of it cannot be told in words, the graph has no key
and is worked out again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from crossfuse.cache import Entry, shelf
from crossfuse.cache.keys import content_key
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.relax.chains.outcome import BinOutcome, ChainOutcome
from crossfuse.torch.fused import Step
from crossfuse.torch.kernels import KeptKernel, offer_kept
from crossfuse.torch.report import Report
from crossfuse.torch.rewrite import Call, rewrite
from crossfuse.torch.words import Untold, environment, node_words

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

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Record:
        """The record of `to_dict`'s values, or any error where they are none."""
        report = record["report"]
        outcomes = tuple(_outcome(each) for each in report["outcomes"])
        made = Report(
            outcomes, tuple(report["untranslated"]), str(report["reason"]), str(report["note"])
        )
        return cls(made, tuple(_step(each) for each in record["steps"]))


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
    try:
        entry = shelf(_KIND).read(key)
        if entry is None:
            return None
        record = Record.from_dict(json.loads(entry.data))
        if not offer_kept(record.kernels):
            return None
    except (KeyError, TypeError, ValueError, OSError, RefusedError):
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


def _step(record: dict[str, Any]) -> Step:
    kernels = (KeptKernel(**{**each, "shape": tuple(each["shape"])}) for each in record["kernels"])
    calls = (
        Call(
            each["output"],
            tuple(each["inputs"]),
            tuple(map(tuple, each["shapes"])),
            each["key"],
        )
        for each in record["calls"]
    )
    return Step(tuple(kernels), tuple(calls))


def _outcome(record: dict[str, Any]) -> ChainOutcome:
    bins = tuple(BinOutcome(**each) for each in record["bins"])
    return ChainOutcome(**{**record, "products": tuple(record["products"]), "bins": bins})
