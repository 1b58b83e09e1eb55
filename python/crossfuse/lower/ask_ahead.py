"""The pass by which kernels that start early ask for weights before they wait.

Such a kernel begins while the one before it ends, and what that one writes may not be read yet.
Weights may: with them on their way, most of a short product's time passes while others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import WAIT_BEHIND
from crossfuse.lower.tree import is_call
from crossfuse.markers import AHEAD, constant_parameters, starts_early

#: The next kernel begins only here: its loads stand behind those of this one in memory's queue.
_SOURCE = f"""\
__device__ __forceinline__ void {WAIT_BEHIND}() {{
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
  asm volatile("griddepcontrol.wait;" : : : "memory");
}}
"""


def ask_ahead() -> Any:
    """Pass: functions that start early do the loads marked `AHEAD` before they wait.

    That is where all of these are of constants. Loads of a loop are done for its first step::

        for step in 8:                        weights = B[0]
            weights = B[step]                 wait()
            sums += A[step] * weights         sums += A[0] * weights
                                              for step in 1 to 8:
                                                  weights = B[step]
                                                  sums += A[step] * weights

    Other kernels of such functions wait at their beginning, see `crossfuse.lower.image`, where it
    is also said why no compiler moves a load of `A` in front of the wait.
    """

    def transform(func: Any) -> Any:
        if not starts_early(func):
            return func
        body = _Asked(constant_parameters(func)).of(func.body)
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return ir.prim_func_pass("AskAhead", transform)


def waits_itself(kernel: Any) -> bool:
    """Whether a kernel waits for the one before it behind loads of its own."""
    calls = (each for each in ir.nodes(kernel.body, ir.Call) if is_call(each, _CALL))
    return any(str(each.args[0].value) == WAIT_BEHIND for each in calls)


_CALL = "tirx.cuda.func_call"


class _Asked:
    """Bodies of kernels with their waits behind loads of constants."""

    def __init__(self, constant: Sequence[str]) -> None:
        self.constant = frozenset(constant)

    def of(self, body: Any) -> Any:
        """The body of a function, launch by launch."""
        return ir.mutate(body, (ir.AttrStmt, self._launch))

    def _launch(self, node: Any, mutator: Any) -> Any:
        """A kernel, if all that it may ask for ahead is constant."""
        marked = [each for each in ir.nodes(node.body, ir.For) if AHEAD in each.annotations]
        given = {str(load.source.name) for each in marked for load in ir.global_loads(each)}
        if str(node.attr_key) != "thread_extent" or not marked or not given <= self.constant:
            return mutator.default_mutate(node)
        asked = ir.mutate(node.body, (ir.For, _loop), (ir.SeqStmt, _sequence))
        return ir.AttrStmt(node.node, node.attr_key, node.value, asked)


def _loop(node: Any, mutator: Any) -> Any:
    """A loop that asks for weights step by step."""
    statements = ir.sequence(node.body)
    loads = [each for each in statements if _is_ahead(each)]
    if not loads:
        return mutator.default_mutate(node)
    allocated = [each for each in statements if isinstance(each, ir.AllocBuffer)]
    others = [each for each in statements if each not in loads and each not in allocated]
    start = {node.loop_var: node.min}
    first = [_again(ir.substitute(each, start)) for each in loads]
    behind = [_again(ir.substitute(each, start)) for each in others]
    rest = ir.SeqStmt([*loads, *others])
    steps = ir.for_like(node, rest, min=node.min + 1, extent=node.extent - 1)
    return ir.SeqStmt([*allocated, *first, _wait(), *behind, steps])


def _sequence(node: Any, mutator: Any) -> Any:
    """Statements of which some ask for all weights at once."""
    statements = list(node.seq)
    asking = [place for place, each in enumerate(statements) if _is_ahead(each)]
    if not asking:
        return mutator.default_mutate(node)
    behind = asking[-1] + 1
    return ir.SeqStmt([*statements[:behind], _wait(), *statements[behind:]])


def _wait() -> Any:
    return ir.Evaluate(ir.cuda_func_call(WAIT_BEHIND, source_code=_SOURCE))


def _is_ahead(statement: Any) -> bool:
    return isinstance(statement, ir.For) and AHEAD in statement.annotations


def _again(statement: Any) -> Any:
    """The same statement with loop variables of its own."""

    def loop(node: Any, mutator: Any) -> Any:
        own = ir.Var(node.loop_var.name, str(node.loop_var.ty))
        body = ir.substitute(mutator.default_mutate(node).body, {node.loop_var: own})
        return ir.for_like(node, body, loop_var=own)

    return ir.mutate(statement, (ir.For, loop))
