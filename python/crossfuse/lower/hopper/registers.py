"""Registers around wgmma: fences while it runs, and their stores to shared memory (stmatrix)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.statements import run
from crossfuse.planner.kernels.boxes import ROW_BYTES

# Places that the compiler must not move registers across: wgmma uses them while it runs.


def hold(registers: Any, count: int) -> None:
    """Fence reads and writes of the first `count` registers of a buffer at this place."""
    _each("hold", "", registers, count, "+")


def forget(registers: Any, count: int) -> None:
    """Declare that the values of the registers are dead."""
    _each("forget", "", registers, count, "=")


def clear(registers: Any, count: int) -> None:
    """Zero the registers here: not before, as the compiler might with a constant."""
    _each("clear", "mov.b32 %0, 0;", registers, count, "=")


def _each(name: str, instruction: str, registers: Any, count: int, access: str) -> None:
    """Emit an instruction for each register; an empty one is only a fence."""
    is_float = str(registers.ty.dtype) == "float32"
    name = f"crossfuse_{name}_{count}" if is_float else f"crossfuse_{name}_words_{count}"
    # Words may be pairs of smaller elements, with a pointer of that type.
    register = "registers[i]" if is_float else "((unsigned*)registers)[i]"
    source = (
        f"__device__ __forceinline__ void {name}({'float' if is_float else 'void'}* registers) "
        f"{{\n#pragma unroll\n  for (int i = 0; i < {count}; ++i) "
        f'asm volatile("{instruction}" : "{access}{"f" if is_float else "r"}"({register}) '
        ':: "memory");\n}\n'
    )
    run(ir.cuda_func_call(name, registers.data, source_code=source))


def scatter(
    where: Coordinates,
    matrices: list[Any],
    pitch: int,
    first: int,
    address: Callable[[Any], Any],
) -> None:
    """Store 8 x 8 matrices from column `first` of a box on, swizzled as its tensor map says.

    Each lane names a row of a matrix: the first 16 lanes those of two matrices one below the other.
    Of two matrices alone, lanes above do not count. `matrices` are registers with two neighbours
    each: both halves of the rows of eight columns, then those of the next eight. `pitch` is the
    bytes of a row of the box, `address` maps a byte in the box to an address (PTX ISA, stmatrix).
    """
    row = where.warp * WARP_ROWS + where.lane % WARP_ROWS
    chunk = first // 8 + (where.lane // WARP_ROWS if len(matrices) > 2 else 0)
    # Every swizzle goes by the number of the 128 bytes that a row lies in.
    pattern = row * pitch // ROW_BYTES % (pitch // 16)
    store = getattr(ir.script.ptx.stmatrix.sync.aligned.m8n8, f"x{len(matrices)}").shared.b16
    inside = row * pitch + (chunk ^ pattern) * 16
    run(store(address(inside), *matrices))
