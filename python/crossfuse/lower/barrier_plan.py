"""Where cluster barriers stand: after the accesses that peers depend on, and nowhere else.

The scheduled function is sequential: a cluster-bound nest ends on all ranks before the next one
starts. A barrier realises that order only where one nest touches a slab that the other nest
touches from another CTA, one of them writing; before the first remote access, because a peer may
not have started; and at the end, because a CTA's shared memory goes when it exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel, own_rank
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access, children, contains_cluster
from crossfuse.lower.uniform import Surroundings
from crossfuse.schedule.markers import cluster_axis, thread_tag

#: What a nest does to a buffer: (is it another CTA's slab, is it a write).
Touch = tuple[bool, bool]


@dataclass
class BarrierPlan:
    """Loops before and after which a cluster barrier stands, by their loop variables."""

    before: dict[Any, str] = field(default_factory=dict)
    after: dict[Any, str] = field(default_factory=dict)


@dataclass
class _State:
    """What happened since the last barrier.

    `pending` are the accesses that no barrier separates from what comes; `started` says whether
    every CTA of the cluster is known to run; `last` are the loops with the latest remote accesses.
    """

    pending: dict[Any, set[Touch]] = field(default_factory=dict)
    started: bool = False
    last: dict[Any, None] = field(default_factory=dict)

    def copy(self) -> _State:
        pending = {buffer: set(touches) for buffer, touches in self.pending.items()}
        return _State(pending, self.started, dict(self.last))

    def join(self, other: _State) -> None:
        """Become what is known if either this or the other path was taken."""
        for buffer, touches in other.pending.items():
            self.pending.setdefault(buffer, set()).update(touches)
        self.started = self.started and other.started
        self.last.update(other.last)

    def barrier(self) -> None:
        self.pending.clear()
        self.last.clear()
        self.started = True


def plan_barriers(kernel: ClusterKernel) -> BarrierPlan:
    """Decide where the kernel needs cluster barriers.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel.

    Returns
    -------
    BarrierPlan
        Empty if no CTA touches a peer's slab.

    Raises
    ------
    LoweringRefused
        If ranks of one nest depend on each other, or a barrier would stand where not all threads
        of the cluster come by.
    """
    planner = _Planner(kernel)
    state = _State()
    planner.visit(kernel.body, state, ())
    if any(remote for touches in state.pending.values() for remote, _ in touches):
        planner.plan.after.update(dict.fromkeys(state.last, "exit"))
    return planner.plan


class _Planner:
    def __init__(self, kernel: ClusterKernel) -> None:
        self.kernel = kernel
        self.plan = BarrierPlan()
        self.surroundings = Surroundings(kernel)

    def visit(self, node: Any, state: _State, path: tuple[Any, ...]) -> None:
        if not contains_cluster(node):
            return
        inside = (*path, node)
        if isinstance(node, ir.For):
            self._loop(node, state, path)
        elif isinstance(node, ir.IfThenElse):
            other = state.copy()
            self.visit(node.then_case, state, inside)
            if node.else_case is not None:
                self.visit(node.else_case, other, inside)
            state.join(other)
        else:
            for child in children(node):
                self.visit(child, state, inside)

    def _loop(self, loop: Any, state: _State, path: tuple[Any, ...]) -> None:
        axis = cluster_axis(loop)
        if axis is not None:
            self._nest(loop, axis, state, path)
        if axis is not None or thread_tag(loop):
            self.visit(loop.body, state, (*path, loop))
            return
        skipped = state.copy()
        # Twice: what the end of one iteration leaves pending meets the start of the next.
        self.visit(loop.body, state, (*path, loop))
        self.visit(loop.body, state, (*path, loop))
        if not ir.constant(loop.extent):
            state.join(skipped)

    def _nest(self, loop: Any, axis: str, state: _State, path: tuple[Any, ...]) -> None:
        touched = self._touches(loop, axis)
        remote = any(is_remote for each in touched.values() for is_remote, _ in each)
        clash = next(
            (b for b in touched if _conflict(state.pending.get(b, set()), touched[b])), None
        )
        if clash is not None or (remote and not state.started):
            reason = f"'{clash.name}'" if clash is not None else "peers must have started"
            self.surroundings.check(loop, path)
            self.plan.before.setdefault(loop.loop_var, reason)
            state.barrier()
        for buffer, touches in touched.items():
            state.pending.setdefault(buffer, set()).update(touches)
        if remote:
            anchor = _exit_anchor(loop, path)
            self.surroundings.check(anchor, path[: _index(path, anchor)])
            state.last = {anchor.loop_var: None}

    def _touches(self, loop: Any, axis: str) -> dict[Any, set[Touch]]:
        """What the nest does to the buffers whose slabs lie along its axis."""
        touched: dict[Any, set[Touch]] = {}
        pushes: dict[Any, list[Access]] = {}
        for access in self.kernel.accesses:
            own_loop = access.cluster_loop(axis)
            if own_loop is None or not own_loop.loop_var.same_as(loop.loop_var):
                continue
            if self.kernel.buffers[access.buffer] == axis:
                remote = not own_rank(access, axis)
                touched.setdefault(access.buffer, set()).add((remote, access.write))
                if remote and access.write:
                    pushes.setdefault(access.buffer, []).append(access)
        for buffer, touches in touched.items():
            if any(_conflict({one}, touches - {one}) for one in touches):
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


def _conflict(earlier: set[Touch], later: set[Touch]) -> bool:
    """Whether two sets of accesses to one buffer need the order of a cluster barrier."""
    return any(
        (remote or other_remote) and (write or other_write)
        for remote, write in earlier
        for other_remote, other_write in later
    )


def _exit_anchor(loop: Any, path: tuple[Any, ...]) -> Any:
    """The loop after which a nest has run for the last time."""
    for node in path:
        if isinstance(node, ir.For) and not thread_tag(node) and cluster_axis(node) is None:
            return node
    return loop


def _index(path: tuple[Any, ...], node: Any) -> int:
    for index, each in enumerate(path):
        if each.same_as(node):
            return index
    return len(path)
