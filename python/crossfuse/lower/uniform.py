"""Whether all threads of a cluster come by a place: cluster barriers may stand nowhere else."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import accesses, children, evaluated
from crossfuse.markers import cluster_axis, thread_tag

_PIPELINE = "software_pipeline_"
_DOUBLE_BUFFER = "double_buffer_scope"
#: Effect kinds of a call whose value depends on its arguments alone (TVM's CallEffectKind).
_PURE = (0, 1)
_JUMPS = (ir.tirx.Break, ir.tirx.Continue, ir.tirx.Return)


class Surroundings:
    """Checks what stands around the barriers of one kernel.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel.
    """

    def __init__(self, kernel: ClusterKernel) -> None:
        self.written = {each.buffer for each in kernel.uses if each.write}
        self.values: dict[Any, Any] = {}
        self.ends: list[Any] = []

        def define(node: Any) -> None:
            self.values[node.var] = node.value

        ir.walk(
            kernel.body,
            (ir.Bind, define),
            *((kind, self.ends.append) for kind in _JUMPS),
        )

    def check(self, loop: Any, path: tuple[Any, ...]) -> None:
        """Refuse a barrier at `loop` inside the statements of `path`.

        Raises
        ------
        LoweringRefused
            If threads of the cluster disagree whether or how often they come by, or a
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
        """TVM loads a double buffer one iteration of the nearest loop ahead."""
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
        calls: list[Any] = []
        ir.walk(expression, (ir.Call, calls.append))
        return next((f"a call of {_callee(each)}" for each in calls if not _is_pure(each)), "")


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
