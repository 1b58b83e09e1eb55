"""Where cluster barriers stand: after the accesses that peers depend on, and nowhere else.

The scheduled function is sequential: a cluster-bound nest ends on all ranks before the next one
starts. A barrier realises that order only where one nest touches a slab that the other nest touches
from another CTA, one of them writing; before the first remote access, because a peer may not have
started; and at the end, because a CTA's shared memory goes when it exits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel, own_rank
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import (
    Access,
    accesses,
    children,
    contains_cluster,
    evaluated,
    is_executed,
)
from crossfuse.markers import cluster_axis, thread_tag

# Nests: the cluster-bound loops of a kernel, and the control flow that leads from one to the next.

#: What a nest does to a buffer: (is it another CTA's slab, is it a write).
Touch = tuple[bool, bool]


@dataclass
class Nest:
    """A cluster-bound loop, the unit between which barriers stand."""

    loop: Any
    #: Statements around it, outermost first.
    path: tuple[Any, ...]
    #: By buffer whose slabs lie along the loop's cluster axis.
    touched: dict[Any, set[Touch]]
    #: Nests of other cluster axes.
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


@dataclass
class Branch:
    """A conditional around nests."""

    then: list[Item]
    otherwise: list[Item]


Item = Nest | Loop | Branch


def read_nests(kernel: ClusterKernel) -> list[Item]:
    """The tree of nests of a kernel; refused if ranks of one nest depend on each other."""
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
    """How a nest touches the buffers whose slabs lie along its axis."""
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


# Surroundings: a cluster barrier may stand only where all threads of the cluster pass equally
# often.

_PIPELINE = "software_pipeline_"
_DOUBLE_BUFFER = "double_buffer_scope"
#: Effect kinds of a call whose value depends on its arguments alone (TVM's CallEffectKind).
_PURE = (0, 1)
_JUMPS = (ir.tirx.Break, ir.tirx.Continue, ir.tirx.Return)


class Surroundings:
    """Checks the control flow around each barrier of a kernel."""

    def __init__(self, kernel: ClusterKernel) -> None:
        self.written = {each.buffer for each in kernel.uses if each.write}
        self.values = {each.var: each.value for each in ir.nodes(kernel.body, ir.Bind)}
        self.ends = ir.nodes(kernel.body, *_JUMPS)

    def check(self, loop: Any, path: tuple[Any, ...]) -> None:
        """Refuse a barrier at `loop` inside the statements of `path`.

        Refused where threads of the cluster disagree whether or how often they pass, and where a
        transformation of TVM would move accesses across the barrier.
        """
        if self.ends:
            found = f"a {type(self.ends[0]).__name__.lower()} statement in the kernel"
            raise _refuse(loop, found, "write the condition around the statements that it guards")
        private = [each.loop_var for each in path if isinstance(each, ir.For) and _private(each)]
        for node in path:
            self._check_kind(loop, node)
            for expression in _control(node):
                reason = self._varying(expression, private)
                if reason:
                    raise _refuse(
                        loop,
                        f"control flow that depends on {reason}: {expression}",
                        "choose tile extents that divide the problem, or move the exchange out of "
                        "the conditional",
                    )

    def _check_kind(self, loop: Any, node: Any) -> None:
        if isinstance(node, ir.tirx.While):
            raise _refuse(loop, "a while loop", "use a for loop of constant extent")
        if not isinstance(node, ir.For):
            return
        name, tag = node.loop_var.name, thread_tag(node)
        notes = [str(key) for key in node.annotations if str(key).startswith(_PIPELINE)]
        if tag.startswith("vthread") and ir.constant(node.extent) != 1:
            raise _refuse(loop, f"virtual threads ({tag}) around the exchange", "unroll the loop")
        if int(node.kind) == int(ir.ForKind.VECTORIZED):
            raise _refuse(
                loop,
                f"vectorised loop '{name}' around the exchange",
                "vectorise a loop inside the cluster-bound loop",
            )
        if notes:
            raise _refuse(
                loop,
                f"a software pipeline over loop '{name}'",
                "pipeline a loop inside the cluster-bound loop",
            )
        if not tag and cluster_axis(node) is None:
            self._check_double_buffers(loop, node)

    def _check_double_buffers(self, loop: Any, node: Any) -> None:
        """Refuse double buffers of a loop around a barrier: TVM loads them one iteration early."""
        block = _double_buffered(node.body)
        if block is not None:
            raise _refuse(
                loop,
                f"a double buffer over loop '{node.loop_var.name}' (block '{block.name_hint}')",
                "double-buffer a stage of a loop inside the cluster-bound loop",
            )

    def _varying(self, expression: Any, private: list[Any]) -> str:
        """What in an expression may differ between threads of the cluster; empty if nothing."""
        for variable in ir.variables(expression):
            if any(variable.same_as(each) for each in private):
                return f"'{variable.name}'"
            if variable in self.values:
                reason = self._varying(self.values[variable], private)
                if reason:
                    return reason
        for access in accesses(ir.Evaluate(expression)):
            if access.buffer.scope() != "global" or access.buffer in self.written:
                return f"'{access.buffer.name}'"
        impure = (each for each in ir.nodes(expression, ir.Call) if not _is_pure(each))
        return next((f"a call of {_callee(each)}" for each in impure), "")


def _private(loop: Any) -> bool:
    """Whether the variable of a loop differs between threads of one cluster."""
    return cluster_axis(loop) is not None or thread_tag(loop).startswith("threadIdx")


def _control(node: Any) -> list[Any]:
    if isinstance(node, ir.For):
        return [] if _private(node) or thread_tag(node) else evaluated(node)
    return evaluated(node) if isinstance(node, (ir.IfThenElse, ir.SBlockRealize)) else []


def _double_buffered(node: Any) -> Any:
    """A double-buffered block with no plain loop between it and `node`, or None."""
    if isinstance(node, ir.SBlock) and _DOUBLE_BUFFER in node.annotations:
        return node
    if isinstance(node, ir.For) and not thread_tag(node) and cluster_axis(node) is None:
        return None
    found = (_double_buffered(child) for child in children(node))
    return next((each for each in found if each is not None), None)


def _callee(call: Any) -> str:
    return str(call.op.name) if isinstance(call.op, ir.Op) else str(call.op)


def _is_pure(call: Any) -> bool:
    if not isinstance(call.op, ir.Op):
        return False
    effect = call.op.get_attr("TCallEffectKind")
    return effect is not None and int(effect) in _PURE


def _refuse(loop: Any, found: str, instead: str) -> Exception:
    return refuse(
        "cluster-barrier",
        f"loop '{loop.loop_var.name}'",
        found=found,
        limit="all threads of a cluster reach every cluster barrier, equally often and in order",
        instead=instead,
    )


@dataclass
class BarrierPlan:
    """Loops before and after which a cluster barrier stands, by their loop variables."""

    before: dict[Any, str] = field(default_factory=dict)
    after: dict[Any, str] = field(default_factory=dict)


@dataclass
class _State:
    """What is known about the time since the last barrier."""

    #: Accesses that no barrier separates from what follows.
    pending: dict[Any, set[Touch]] = field(default_factory=dict)
    #: Whether every CTA of the cluster is known to run.
    started: bool = False
    #: Loops with the latest remote accesses.
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
    """Decide where the kernel needs cluster barriers; nowhere if no CTA touches a peer's slab.

    Refuses ranks of one nest that depend on each other, and a barrier where not all threads of the
    cluster pass.
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
    """Follow the program from its start, adding barriers where they are missing."""
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
            if not is_executed(item.loop):
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
    """Refuse a plan with a barrier where not all threads of the cluster pass."""
    for item in items:
        if isinstance(item, Branch):
            _check([*item.then, *item.otherwise], plan, surroundings)
            continue
        if item.loop.loop_var in plan.before or item.loop.loop_var in plan.after:
            surroundings.check(item.loop, item.path)
        _check(item.inside, plan, surroundings)
