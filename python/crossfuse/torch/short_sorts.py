"""The largest of few numbers, as a router chooses experts, in a kernel that inductor writes.

Inductor leaves ``topk`` to torch, which launches two kernels of its own: 9 us on an H200 for the
8 largest of 128, where a sort of so few in registers is a part of the kernel that made them.
"""

from __future__ import annotations

from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from crossfuse.torch.rewrite import inserted

#: Elements at most that inductor sorts in a kernel of its own (torch 2.11), and rows: 64 of 128
#: take it 27 us on an H200, and 16 of them 3, where torch's two kernels take 13.
_MOST, _ROWS = 512, 16
_TOPK, _SORT, _SLICE = (
    torch.ops.aten.topk.default,
    torch.ops.aten.sort.stable,
    torch.ops.aten.slice.Tensor,
)


def sort_short(module: fx.GraphModule) -> None:
    """Replace the largest of at most 512, of few rows, by the first of all, sorted; in place.

    Of equal numbers the first ones are taken, of which torch says nothing, and numbers that are
    none count as the largest in both.
    """
    found = [each for each in module.graph.nodes if each.target is _TOPK and _is_short(each)]
    for node in found:
        _sort(module.graph, node)
    if found:
        module.recompile()


def _told(node: fx.Node) -> tuple[fx.Node, Any, int, bool]:
    """What a node chooses among, how many, along which axis, and whether the largest."""
    x, count, *others = node.args
    assert isinstance(x, fx.Node)
    known: dict[str, Any] = dict(zip(("dim", "largest"), others, strict=False))
    known |= node.kwargs
    return x, count, known.get("dim", -1), known.get("largest", True)


def _is_short(node: fx.Node) -> bool:
    x, count, axis, _ = _told(node)
    shape = x.meta["val"].shape
    taken = all(each.target is getitem for each in node.users)
    if not taken or not shape or not isinstance(count, int):
        return False
    if axis % len(shape) != len(shape) - 1 or not all(isinstance(each, int) for each in shape):
        return False
    return shape[axis] <= _MOST and prod(shape[:-1]) <= _ROWS


def _sort(graph: fx.Graph, node: fx.Node) -> None:
    x, count, axis, largest = _told(node)
    with graph.inserting_before(node):
        every = inserted(graph, _SORT, x, stable=True, dim=axis, descending=largest)
        made = [inserted(graph, getitem, every, place) for place in range(2)]
        first = [inserted(graph, _SLICE, each, axis, 0, count) for each in made]
    for each in list(node.users):
        each.replace_all_uses_with(first[each.args[1]])
        graph.erase_node(each)
    graph.erase_node(node)
