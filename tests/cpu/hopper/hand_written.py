"""Kernels that a person writes in TIRx, which multiply by `gemm_async`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from crossfuse.hardware import device
from crossfuse.lower.hopper.gemm_async import waited_sums
from crossfuse.lower.hopper.generate import _cuda, _device_function
from crossfuse.lower.hopper.wgmma import (
    accumulator_layout,
    operand_layout,
    shared_layout,
)
from crossfuse.lower.image import BufferSpec, KernelImage, Launch


@dataclass(frozen=True)
class Tiles:
    """What a kernel multiplies, and how it lies."""

    n: int = 64
    k: int = 128
    depth: int = 64
    dtype: str = "bfloat16"
    right: str = ""
    transposed: bool = False
    registers: bool = False
    swizzled: bool = True
    warpgroups: int = 1

    @property
    def right_type(self) -> str:
        return self.right or self.dtype


def product(tiles: Tiles, layouts: dict[str, Any] | None = None) -> Any:
    """``C = A B^T``: 64 rows for each warpgroup, two stages of tiles, ordinary loads."""
    n, k, depth, warpgroups = tiles.n, tiles.k, tiles.depth, tiles.warpgroups
    rows = 64 * warpgroups
    dtype, other = tiles.dtype, tiles.right_type
    b_shape = (k, n) if tiles.transposed else (n, k)
    b_tile = (depth, n) if tiles.transposed else (n, depth)
    found = {
        "A": shared_layout(dtype, (2, rows, depth), swizzled=tiles.swizzled),
        "B": shared_layout(other, (2, *b_tile)),
        "C": accumulator_layout(n),
        "R": operand_layout(depth, dtype),
    } | (layouts or {})
    transposed, in_registers = tiles.transposed, tiles.registers
    each = 2 if dtype.endswith("16") else 4  # elements of a register

    @T.prim_func
    def func(a: T.handle, b: T.handle, c: T.handle):
        A = T.match_buffer(a, (rows, k), dtype)
        B = T.match_buffer(b, b_shape, other)
        C = T.match_buffer(c, (rows, n), "float32")
        T.device_entry()
        T.cta_id([1])
        warpgroup = T.warpgroup_id([warpgroups])
        thread = T.thread_id_in_wg([128])
        A_s = T.alloc_buffer((2, rows, depth), dtype, scope="shared", layout=found["A"], align=1024)
        B_s = T.alloc_buffer((2, *b_tile), other, scope="shared", layout=found["B"], align=1024)
        A_r = T.alloc_buffer((64, depth), dtype, scope="local", layout=found["R"])
        sums = T.alloc_buffer((64, n), "float32", scope="local", layout=found["C"])
        for step in T.serial(k // depth):
            if in_registers:
                own_row = warpgroup * 64 + thread // 32 * 16 + thread % 32 // 4
                own_column = step * depth + thread % 4 * each
                held = A_r.local()
                for e in T.unroll(depth // 2):
                    held[e] = A[
                        own_row + e // each % 2 * 8,
                        own_column + e // (2 * each) * (4 * each) + e % each,
                    ]
            else:
                for turn in T.serial(64 * depth // 128):
                    at = (turn * warpgroups + warpgroup) * 128 + thread
                    A_s[step % 2, at // depth, at % depth] = A[
                        at // depth, step * depth + at % depth
                    ]
            for turn in T.serial(n * depth // (2 * rows)):
                at = (turn * warpgroups + warpgroup) * 128 + thread
                if transposed:
                    B_s[step % 2, at // n, at % n] = B[step * depth + at // n, at % n]
                else:
                    B_s[step % 2, at // depth, at % depth] = B[
                        at // depth, step * depth + at % depth
                    ]
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
            if in_registers:
                Tx.wg.gemm_async(sums, A_r, B_s[step % 2, :, :], transB=transposed, accum=step > 0)
            else:
                Tx.wg.gemm_async(
                    sums,
                    A_s[step % 2, warpgroup * 64 : warpgroup * 64 + 64, :],
                    B_s[step % 2, :, :],
                    transB=transposed,
                    accum=step > 0,
                )
            T.ptx.wgmma.commit_group.sync.aligned()
            T.ptx.wgmma.wait_group.sync.aligned(0)
            T.cuda.cta_sync()
        own = waited_sums(sums)
        for i in T.unroll(n // 2):
            C[
                warpgroup * 64 + thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8,
                i // 4 * 8 + thread % 4 * 2 + i % 2,
            ] = own[i]

    return func


def image(tiles: Tiles) -> KernelImage:
    """The kernel's generated text, to be emulated."""
    kernel = _device_function(product(tiles), device("nvidia-h100"), "product")
    b_shape = (tiles.k, tiles.n) if tiles.transposed else (tiles.n, tiles.k)
    buffers = (
        BufferSpec("A", (64 * tiles.warpgroups, tiles.k), tiles.dtype, False),
        BufferSpec("B", b_shape, tiles.right_type, False),
        BufferSpec("C", (64 * tiles.warpgroups, tiles.n), "float32", True),
    )
    block = (128 * tiles.warpgroups, 1, 1)
    launch = Launch(kernel[0], (1, 1, 1), block, (1, 1, 1), 0, ("A", "B", "C"))
    return KernelImage("product", _cuda([kernel]), buffers, (launch,))
