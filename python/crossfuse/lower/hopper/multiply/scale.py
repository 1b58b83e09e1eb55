"""Sums of a warpgroup times a factor of each row."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import run


def scale(registers: Any, count: int, above: Any, below: Any) -> None:
    """Multiply a thread's sums of one block of 64 rows, of which it has two.

    Parameters
    ----------
    registers : Any
        Float32 sums: those of ``4 j + 2 h + q`` are of row h.
    count : int
        How many.
    above, below : Any
        The factors of its first row, and of that 8 rows further down.
    """
    name = f"crossfuse_scale_{count}"
    source = (
        f"__device__ __forceinline__ void {name}(float* sums, float above, float below) {{\n"
        f"#pragma unroll\n  for (int i = 0; i < {count}; ++i) "
        "sums[i] *= i / 2 % 2 ? below : above;\n}\n"
    )
    run(ir.cuda_func_call(name, registers.data, above, below, source_code=source))
