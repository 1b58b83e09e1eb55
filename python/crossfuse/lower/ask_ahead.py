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

        squares = sum(A * A)                  weights = B[0]
        for step in 8:                        wait()
            weights = B[step]                 squares = sum(A * A)
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
    if not _asks(node):
        return mutator.default_mutate(node)
    front, behind = _apart(node)
    return ir.SeqStmt([*front, *behind])


def _sequence(node: Any, mutator: Any) -> Any:
    """Statements of which some ask for all weights at once, or one is a loop that does.

    What stands in front of these, as sums of rows, may read what the wait is for.
    """
    statements = list(node.seq)
    if any(map(_is_ahead, statements)):
        front, behind = _loads_first(statements)
        return ir.SeqStmt([*front, _wait(), *behind])
    place = next((place for place, each in enumerate(statements) if _asks(each)), None)
    if place is None:
        return mutator.default_mutate(node)
    front, behind = _apart(statements[place])
    return ir.SeqStmt([*front, *statements[:place], *behind, *statements[place + 1 :]])


def _asks(statement: Any) -> bool:
    """Whether a statement is a loop that asks for weights step by step."""
    return isinstance(statement, ir.For) and any(map(_is_ahead, ir.sequence(statement.body)))


def _apart(loop: Any) -> tuple[list[Any], list[Any]]:
    """What a loop that asks for weights does up to the wait, and behind it."""
    front, others = _loads_first(ir.sequence(loop.body))
    start = {loop.loop_var: loop.min}
    loads = [each for each in front if _is_ahead(each)]
    first = [_again(ir.substitute(each, start)) if each in loads else each for each in front]
    behind = [_again(ir.substitute(each, start)) for each in others]
    rest = ir.SeqStmt([*loads, *others])
    steps = ir.for_like(loop, rest, min=loop.min + 1, extent=loop.extent - 1)
    return [*first, _wait()], [*behind, steps]


def _loads_first(statements: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Loads of weights with the registers of all statements, and the other statements."""
    loads = [each for each in statements if _is_ahead(each)]
    allocated = [each for each in statements if isinstance(each, ir.AllocBuffer)]
    others = [each for each in statements if each not in loads and each not in allocated]
    return [*allocated, *loads], others


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
