"""Registers around wgmma: fences while it runs, and their way to shared memory (stmatrix)."""

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
    """Keep what writes and reads the first registers of a buffer on its side of this place."""
    _each("hold", "", registers, count, "+")


def forget(registers: Any, count: int) -> None:
    """Tell the compiler that what they held is of no use any more."""
    _each("forget", "", registers, count, "=")


def clear(registers: Any, count: int) -> None:
    """Set them to zero here: not before, as the compiler might with a constant."""
    _each("clear", "mov.b32 %0, 0;", registers, count, "=")


def _each(name: str, instruction: str, registers: Any, count: int, access: str) -> None:
    """An instruction on each of them, or an empty one."""
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


# Registers of a warp to shared memory: 8 x 8 matrices of 16-bit elements (PTX ISA, stmatrix).


def scatter(
    where: Coordinates,
    matrices: list[Any],
    pitch: int,
    first: int,
    address: Callable[[Any], Any],
) -> None:
    """Store matrices from a column of a box on; rows are swizzled as the tensor map says.

    Each lane names a row of a matrix: the first 16 lanes those of two matrices one below the
    other. Of two matrices alone, lanes above do not count.

    Parameters
    ----------
    where : Coordinates
        Of the thread.
    matrices : list
        Registers with two neighbours each: both halves of the rows of eight columns, then those of
        the next eight.
    pitch : int
        Bytes of a row of the box.
    first : int
        The column.
    address : Callable
        Function from a byte in the box to its address.
    """
    row = where.warp * WARP_ROWS + where.lane % WARP_ROWS
    chunk = first // 8 + (where.lane // WARP_ROWS if len(matrices) > 2 else 0)
    # Every swizzle goes by the number of the 128 bytes that a row lies in.
    pattern = row * pitch // ROW_BYTES % (pitch // 16)
    store = getattr(ir.script.ptx.stmatrix.sync.aligned.m8n8, f"x{len(matrices)}").shared.b16
    inside = row * pitch + (chunk ^ pattern) * 16
    run(store(address(inside), *matrices))
