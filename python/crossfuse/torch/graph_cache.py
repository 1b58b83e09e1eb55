"""What became of a graph, cached by a text of the graph."""

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
from crossfuse.schema import read
from crossfuse.torch.graph_key import Untold, environment, node_words
from crossfuse.torch.kernels import KeptKernel, offer_kept
from crossfuse.torch.report import Report
from crossfuse.torch.rewrite import Call, rewrite

# Graphs that were fused before: what became of them, from the cache, without TVM.
#
# A graph is known by all that decides what becomes of it: its operators, shapes, strides, types and
# constants, but not the values of tensors; the options; the device; the releases of torch, TVM and
# nvcc; and this package's own files. Where any of it cannot be put in words, the graph has no key
# and is worked out again.

_KIND = "graph"


@dataclass(frozen=True)
class Record:
    """What became of a graph, in a form that another process can repeat."""

    report: Report
    #: Kernels that the graph calls.
    kernels: tuple[KeptKernel, ...] = ()
    #: What takes the place of which nodes.
    calls: tuple[Call, ...] = ()

    @property
    def label(self) -> str:
        """Describe it for people."""
        names = ", ".join(dict.fromkeys(self.report.fused)) or "no kernels"
        return f"graph of {len(self.report.outcomes)} groups: {names}"

    def to_dict(self) -> dict[str, Any]:
        """Convert to values that `json` can write."""
        return asdict(self)


def graph_key(graph: fx.Graph, target: Device, options: Sequence[Any]) -> str:
    """Cache key of a graph of aten operators; empty if it has none.

    Nodes carry ``meta["val"]``. `options` are what else decides which groups become kernels, told
    apart by ``repr``. Graphs of symbolic shapes and those with parts that have no words have no
    key. `EnvironmentRefused` is raised without nvcc, whose release is part of the key.
    """
    try:
        lines = [node_words(each, "val") for each in graph.nodes]
    except Untold:
        return ""
    return content_key(target, _KIND, *environment(), *map(repr, options), "\n".join(lines))


def recall(module: fx.GraphModule, key: str) -> Record | None:
    """Repeat, in place, what was done to a graph before.

    None, and no change, where the graph or one of its kernels is not in the cache.
    """
    record = shelf(_KIND).read(key, lambda entry: read(Record, entry.data))
    try:
        if record is None or not _fits(record, module) or not offer_kept(record.kernels):
            return None
    except RefusedError:
        return None
    if record.calls:
        rewrite(module, record.calls)
    return record


def remember(key: str, record: Record) -> None:
    """Cache what became of a graph, under its key before that.

    All kernels of the record must be in the cache.
    """
    data = json.dumps(record.to_dict()).encode()
    shelf(_KIND).write(key, Entry(data, {"label": record.label}))


def _fits(record: Record, module: fx.GraphModule) -> bool:
    """Whether the calls of a record name nodes of a graph, and kernels of their own."""
    names = {each.name for each in module.graph.nodes}
    keys = {each.key for each in record.kernels}
    return all(
        {each.output, *each.inputs} <= names
        and each.key in keys
        and len(each.inputs) == len(each.shapes)
        for each in record.calls
    )
