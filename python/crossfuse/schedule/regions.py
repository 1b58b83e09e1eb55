"""Read regions that a block declares, larger than what one of its iterations touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir

_READ = 0


def declare_read(
    sch: Any, block: Any, index: int, region: Callable[..., list[tuple[Any, Any]]]
) -> None:
    """Declare what a block reads of a buffer, as a recorded instruction.

    ``Schedule.annotate_buffer_access`` does the same, but wants as many ranges as the block has
    iteration variables, which a reduction block has more of than its operand has dimensions.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule.
    block : SBlockRV
        The reading block.
    index : int
        Which of its reads.
    region : Callable
        Gets the block's iteration variables; returns (begin, end) for each buffer dimension.
    """
    variables = [each.var for each in sch.get(block).iter_vars]
    bounds = [bound for pair in region(*variables) for bound in pair]
    mapping = ir.tirx.IndexMap(variables, bounds, None)
    annotate = ir.s_tir.schedule._ffi_api.ScheduleAnnotateBufferAccess
    annotate(sch, block, index, _READ, mapping)
