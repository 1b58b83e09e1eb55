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
from crossfuse.lower.nests import Branch, Item, Nest, Touch, conflict, read_nests
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

    @property
    def is_exposed(self) -> bool:
        """Whether a CTA that exits now may take memory with it that a peer still touches."""
        return any(remote for touches in self.pending.values() for remote, _ in touches)

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
    plan = BarrierPlan()
    end = _follow(items, plan)
    _thin(items, plan)
    if end.is_exposed:
        plan.after.update(dict.fromkeys(_follow(items, plan).last, "exit"))
        _thin(items, plan)
    _check(items, plan, Surroundings(kernel))
    return plan


def _follow(items: list[Item], plan: BarrierPlan) -> _State:
    """Follow the program from its start, and put barriers where they are missing."""
    state = _State()
    _run(items, state, plan)
    return state


def _thin(items: list[Item], plan: BarrierPlan) -> None:
    """Drop barriers that others make unnecessary.

    A barrier found in the second iteration of a loop may do the work of one found in the first,
    and one before the exit that of one before a nest that not all clusters run.
    """
    exposed = _follow(items, plan).is_exposed
    for where in (plan.before, plan.after):
        for variable, reason in list(where.items()):
            del where[variable]
            count = len(plan.before)
            if _follow(items, plan).is_exposed > exposed or len(plan.before) > count:
                for each in list(plan.before)[count:]:
                    del plan.before[each]
                where[variable] = reason


def _run(items: list[Item], state: _State, plan: BarrierPlan) -> None:
    for item in items:
        if isinstance(item, Branch):
            other = state.copy()
            _run(item.then, state, plan)
            _run(item.otherwise, other, plan)
            state.join(other)
            continue
        if isinstance(item, Nest):
            _enter(item, state, plan)
            _run(item.inside, state, plan)
        else:
            skipped = state.copy()
            # Twice: what the end of one iteration leaves pending meets the start of the next.
            _run(item.inside, state, plan)
            _run(item.inside, state, plan)
            if not item.is_executed:
                state.join(skipped)
        if item.loop.loop_var in plan.after:
            state.barrier()


def _enter(nest: Nest, state: _State, plan: BarrierPlan) -> None:
    reason = state.needs_barrier(nest)
    if reason:
        plan.before.setdefault(nest.loop.loop_var, reason)
    if nest.loop.loop_var in plan.before:
        state.barrier()
    state.add(nest)


def _check(items: list[Item], plan: BarrierPlan, surroundings: Surroundings) -> None:
    """Refuse a plan with a barrier where not all threads of the cluster come by."""
    for item in items:
        if isinstance(item, Branch):
            _check([*item.then, *item.otherwise], plan, surroundings)
            continue
        if item.loop.loop_var in plan.before or item.loop.loop_var in plan.after:
            surroundings.check(item.loop, item.path)
        _check(item.inside, plan, surroundings)
