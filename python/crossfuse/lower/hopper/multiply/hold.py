"""Places that the compiler must not move registers across: wgmma uses them while it runs."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import run


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
