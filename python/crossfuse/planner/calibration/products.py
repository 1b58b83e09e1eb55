"""CUDA text of wgmma instructions for the benchmark of the tensor cores, one for each width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """An element type of wgmma's operands.

    Attributes
    ----------
    ptx : str
        Its name in PTX.
    k : int
        Elements of the reduction in an instruction: 32 bytes.
    numbers : int
        Bits of a random word that may be set: two or four numbers below 2 in magnitude.
    """

    ptx: str
    k: int
    numbers: int


TYPES = {
    # Sign, all exponent bits but the highest (so no infinities), mantissa.
    "bfloat16": ElementType("bf16", 16, 0xBFFFBFFF),
    "float16": ElementType("f16", 16, 0xBFFFBFFF),
    "float8_e4m3fn": ElementType("e4m3", 32, 0xBFBFBFBF),
}
COLUMNS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""Columns of a tile that are measured; those between are interpolated."""


def products(dtype: str, columns: tuple[int, ...] = COLUMNS) -> str:
    """Write the header ``products.cuh`` of one element type.

    Parameters
    ----------
    dtype : str
        A key of `TYPES`.
    columns : tuple[int, ...]
        Columns of the tiles to measure: multiples of 8 up to 256.

    Returns
    -------
    str
        CUDA C++: a class template ``Product<columns>`` whose ``run`` is one wgmma (PTX ISA 8.0,
        wgmma.mma_async), the columns that are measured, and what the type is called.
    """
    kind = TYPES[dtype]
    head = f"""\
#pragma once
#include <cstdint>

constexpr const char* kTypeName = "{dtype}";
constexpr int kElementBytes = {32 // kind.k};
constexpr uint32_t kNumbers = {kind.numbers:#x}u;

template <int... kColumns>
struct Columns {{}};
using MeasuredColumns = Columns<{", ".join(map(str, columns))}>;

template <int kColumns>
struct Product;
"""
    return head + "".join(_product(kind, each) for each in columns)


def _product(kind: ElementType, columns: int) -> str:
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    registers = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    # Types of 8 bits have K-major operands alone, and so no say about it.
    layouts = ", 0, 0" if kind.k == 16 else ""
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{kind.k}.f32.{kind.ptx}.{kind.ptx}"
    return f"""
template <>
struct Product<{columns}> {{
  static __device__ __forceinline__ void run(float (&sums)[{count}], uint64_t left,
                                             uint64_t right) {{
    asm volatile(
        "{name} {{{sums}}}, %{count}, %{count + 1}, 1, 1, 1{layouts};"
        : {registers}
        : "l"(left), "l"(right));
  }}
}};
"""
