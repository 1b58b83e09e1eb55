"""Loop extents as the trace knows them, so that a sampled size stays mutable.

``sch.get(loop).extent`` is a number: baked into a later instruction it would survive a mutation
of the decision it came from. The factor given to ``split`` is the random variable itself.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.schedule.facts import constant_extent


def symbolic_extent(sch: Any, loop: Any) -> Any:
    """Extent of `loop` as a random variable where the trace has one, else as an int.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        A schedule with a trace.
    loop : LoopRV
        A live loop.

    Returns
    -------
    ExprRV | int
        The factor of the ``split`` that made the loop, if it was given; the number otherwise.
    """
    number = constant_extent(sch, "extent", loop)
    if sch.trace is None:
        return number
    target = sch.get_sref(loop)
    for instruction in reversed(list(sch.trace.insts)):
        if instruction.kind.name != "Split":
            continue
        for output, factor in zip(instruction.outputs, list(instruction.inputs)[1:], strict=True):
            if factor is None or not _is_live(sch, output, target):
                continue
            return factor if isinstance(factor, ir.Var) else number
    return number


def _is_live(sch: Any, output: Any, target: Any) -> bool:
    """Whether a loop made by an earlier instruction is still the loop `target` refers to."""
    try:
        return bool(sch.get_sref(output).same_as(target))
    except (ir.ScheduleError, IndexError, ValueError, RuntimeError):
        return False
