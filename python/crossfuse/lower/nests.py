"""The cluster-bound nests of a kernel, and how control flow leads from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel, own_rank
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access, children, contains_cluster
from crossfuse.markers import cluster_axis, thread_tag

#: What a nest does to a buffer: (is it another CTA's slab, is it a write).
Touch = tuple[bool, bool]


@dataclass
class Nest:
    """A cluster-bound loop.

    Attributes
    ----------
    loop : Any
        The loop.
    path : tuple
        Statements around it, outermost first.
    touched : dict
        What it does to the buffers whose slabs lie along its axis.
    inside : list
        Nests of other axes inside it.
    """

    loop: Any
    path: tuple[Any, ...]
    touched: dict[Any, set[Touch]]
    inside: list[Item] = field(default_factory=list)

    @property
    def is_remote(self) -> bool:
        """Whether it touches slabs of other CTAs."""
        return any(remote for touches in self.touched.values() for remote, _ in touches)

    @property
    def outermost(self) -> Any:
        """The loop after which the nest has run for the last time."""
        return next((node for node in self.path if _is_plain_loop(node)), self.loop)


@dataclass
class Loop:
    """A plain loop around nests."""

    loop: Any
    path: tuple[Any, ...]
    inside: list[Item]

    @property
    def is_executed(self) -> bool:
        """Whether its body surely runs."""
        return (ir.constant(self.loop.extent) or 0) > 0


@dataclass
class Branch:
    """A conditional around nests."""

    then: list[Item]
    otherwise: list[Item]


Item = Nest | Loop | Branch


def read_nests(kernel: ClusterKernel) -> list[Item]:
    """Find the nests of a kernel.

    Raises
    ------
    LoweringRefused
        If ranks of one nest depend on each other.
    """
    return _items(kernel.body, (), kernel)


def conflict(earlier: set[Touch], later: set[Touch]) -> bool:
    """Whether two sets of accesses to one buffer need the order of a cluster barrier."""
    return any(
        (remote or other_remote) and (write or other_write)
        for remote, write in earlier
        for other_remote, other_write in later
    )


def _items(node: Any, path: tuple[Any, ...], kernel: ClusterKernel) -> list[Item]:
    if not contains_cluster(node):
        return []
    inside = (*path, node)
    if isinstance(node, ir.IfThenElse):
        then = _items(node.then_case, inside, kernel)
        other = [] if node.else_case is None else _items(node.else_case, inside, kernel)
        return [Branch(then, other)]
    below = [item for child in children(node) for item in _items(child, inside, kernel)]
    if isinstance(node, ir.For):
        axis = cluster_axis(node)
        if axis is not None:
            return [Nest(node, path, _touches(kernel, node, axis), below)]
        if _is_plain_loop(node):
            return [Loop(node, path, below)]
    return below


def _is_plain_loop(node: Any) -> bool:
    return isinstance(node, ir.For) and not thread_tag(node) and cluster_axis(node) is None


def _touches(kernel: ClusterKernel, loop: Any, axis: str) -> dict[Any, set[Touch]]:
    """What the nest does to the buffers whose slabs lie along its axis."""
    touched: dict[Any, set[Touch]] = {}
    pushes: dict[Any, list[Access]] = {}
    for access in kernel.accesses:
        own_loop = access.cluster_loop(axis)
        if own_loop is None or not own_loop.loop_var.same_as(loop.loop_var):
            continue
        if kernel.buffers[access.buffer] == axis:
            remote = not own_rank(access, axis)
            touched.setdefault(access.buffer, set()).add((remote, access.write))
            if remote and access.write:
                pushes.setdefault(access.buffer, []).append(access)
    for buffer, touches in touched.items():
        if any(conflict({one}, touches - {one}) for one in touches):
            raise _dependence(
                loop, buffer, "a nest that writes slabs and touches those of other ranks"
            )
        # One remote store writes distinct elements (that is verified); two might not, and
        # threads of one CTA are not synchronised between them.
        if len(pushes.get(buffer, ())) > 1:
            text = "; ".join(each.site.text for each in pushes[buffer])
            raise _dependence(loop, buffer, f"two stores to slabs of other ranks: {text}")
    return touched


def _dependence(loop: Any, buffer: Any, found: str) -> Exception:
    return refuse(
        "cluster-dependence",
        f"loop '{loop.loop_var.name}', buffer '{buffer.name}'",
        found=found,
        limit="iterations of a cluster-bound loop are independent CTAs",
        instead="put the exchange into a cluster-bound nest of its own, after the nest that fills "
        "the slabs",
    )
