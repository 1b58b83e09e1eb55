"""Declares read regions of a block that are larger than one of its iterations touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir

_READ = 0


def declare_read(
    sch: Any, block: Any, index: int, region: Callable[..., list[tuple[Any, Any]]]
) -> None:
    """Declare the region of a buffer that a block reads, as a recorded instruction.

    ``Schedule.annotate_buffer_access`` does the same, but wants as many ranges as the block has
    iteration variables, which a reduction block has more of than its operand has dimensions.
    `index` is that of the read; `region` takes the block's iteration variables and returns (begin,
    end) for each buffer dimension.
    """
    variables = [each.var for each in sch.get(block).iter_vars]
    bounds = [bound for pair in region(*variables) for bound in pair]
    mapping = ir.tirx.IndexMap(variables, bounds, None)
    annotate = ir.s_tir.schedule._ffi_api.ScheduleAnnotateBufferAccess
    annotate(sch, block, index, _READ, mapping)
