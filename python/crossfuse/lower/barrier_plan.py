"""Where cluster barriers stand: after the accesses that peers depend on, and nowhere else.

The scheduled function is sequential: a cluster-bound nest ends on all ranks before the next one
starts. A barrier realises that order only where one nest touches a slab that the other nest
touches from another CTA, one of them writing; before the first remote access, because a peer may
not have started; and at the end, because a CTA's shared memory goes when it exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.nests import Branch, Item, Loop, Nest, Touch, conflict, read_nests
from crossfuse.lower.uniform import Surroundings


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

    def needs_barrier(self, nest: Nest) -> str:
        """Why a barrier must stand before a nest; empty if none must."""
        for buffer, touches in nest.touched.items():
            if conflict(self.pending.get(buffer, set()), touches):
                return f"'{buffer.name}'"
        return "peers must have started" if nest.is_remote and not self.started else ""

    def add(self, nest: Nest) -> None:
        for buffer, touches in nest.touched.items():
            self.pending.setdefault(buffer, set()).update(touches)
        if nest.is_remote:
            self.last = {nest.outermost.loop_var: None}


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
    items = read_nests(kernel)
    before: dict[Any, str] = {}
    _run(items, _State(), before)
    # A barrier found in the second iteration of a loop may make one of the first unnecessary.
    for variable in list(before):
        others = {each: why for each, why in before.items() if each is not variable}
        trial = dict(others)
        _run(items, _State(), trial)
        if len(trial) == len(others):
            before = others
    state = _State()
    _run(items, state, before)
    plan = BarrierPlan(before)
    if any(remote for touches in state.pending.values() for remote, _ in touches):
        plan.after.update(dict.fromkeys(state.last, "exit"))
    _check(items, plan, Surroundings(kernel))
    return plan


def _run(items: list[Item], state: _State, before: dict[Any, str]) -> None:
    """Follow the program; put barriers where they are missing."""
    for item in items:
        if isinstance(item, Nest):
            reason = state.needs_barrier(item)
            if reason:
                before.setdefault(item.loop.loop_var, reason)
            if item.loop.loop_var in before:
                state.barrier()
            state.add(item)
            _run(item.inside, state, before)
        elif isinstance(item, Loop):
            skipped = state.copy()
            # Twice: what the end of one iteration leaves pending meets the start of the next.
            _run(item.inside, state, before)
            _run(item.inside, state, before)
            if not item.is_executed:
                state.join(skipped)
        else:
            other = state.copy()
            _run(item.then, state, before)
            _run(item.otherwise, other, before)
            state.join(other)


def _check(items: list[Item], plan: BarrierPlan, surroundings: Surroundings) -> None:
    """Refuse a plan with a barrier where not all threads of the cluster come by."""
    for item in items:
        if isinstance(item, Branch):
            _check([*item.then, *item.otherwise], plan, surroundings)
            continue
        if item.loop.loop_var in plan.before or item.loop.loop_var in plan.after:
            surroundings.check(item.loop, item.path)
        _check(item.inside, plan, surroundings)
