"""What TIRx's `gemm_async` on sm_90a refuses, each with its text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout

from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.hopper.gemm_async import is_hopper
from crossfuse.lower.hopper.generate import _device_function
from crossfuse.lower.hopper.wgmma import (
    accumulator_layout,
    operand_layout,
    shared_layout,
)

H100 = device("nvidia-h100")


class Case:
    """Buffers of a product and the regions that are multiplied, right unless told otherwise."""

    def __init__(self, **changes: Any) -> None:
        self.types = ("bfloat16", "bfloat16", "float32")
        self.shapes = ((64, 64), (32, 64), (64, 32))
        self.scopes = ("shared", "shared", "local")
        self.layouts: dict[str, Any] = {}
        self.regions = ((0, 64, 0, 64), (0, 32, 0, 64))
        self.transposed = (False, False)
        self.warp = False
        for name, value in changes.items():
            setattr(self, name, value)

    def func(self) -> Any:
        (a, b, c), (a_shape, b_shape, c_shape) = self.types, self.shapes
        in_a, in_b, in_c = self.scopes
        found = dict(self.layouts)
        if "A" not in found:
            in_registers = in_a == "local"
            found["A"] = (
                operand_layout(a_shape[1], a) if in_registers else shared_layout(a, a_shape)
            )
        if "B" not in found:
            found["B"] = shared_layout(b, b_shape)
        if "C" not in found:
            found["C"] = accumulator_layout(c_shape[1])
        (a0, a1, a2, a3), (b0, b1, b2, b3) = self.regions
        trans_a, trans_b = self.transposed
        call = Tx.warp.gemm_async if self.warp else Tx.wg.gemm_async

        @T.prim_func
        def func(out: T.handle):
            O = T.match_buffer(out, (128,), "float32")  # noqa: E741
            T.device_entry()
            T.cta_id([1])
            T.warpgroup_id([1])
            thread = T.thread_id_in_wg([128])
            A = T.alloc_buffer(a_shape, a, scope=in_a, layout=found["A"], align=1024)
            B = T.alloc_buffer(b_shape, b, scope=in_b, layout=found["B"], align=1024)
            C = T.alloc_buffer(c_shape, c, scope=in_c, layout=found["C"], align=1024)
            call(
                C,
                A[a0:a1, a2:a3],
                B[b0:b1, b2:b3],
                transA=trans_a,
                transB=trans_b,
            )
            O[thread] = T.float32(0)

        return func


def plain(*shape: int) -> Any:
    return TileLayout(S[shape])


#: What is wrong, and what the report says of our variant.
REFUSED: dict[str, tuple[Case, str]] = {
    "a warp": (
        Case(warp=True),
        "gemm-async: gemm_async: found scope warp with threads {'laneid': [32, 0]}; limit: all "
        "threads of a warpgroup. Instead: call it as Tx.wg.gemm_async",
    ),
    "types of one width that differ": (
        Case(types=("bfloat16", "float16", "float32")),
        "gemm-async: A 'A': found operands of bfloat16 and float16; limit: one 16-bit type, or two "
        "of 8 bits, of float16, bfloat16, float8_e4m3fn, float8_e5m2.",
    ),
    "types of two widths": (
        Case(
            types=("float8_e4m3fn", "float16", "float32"),
            shapes=((64, 128), (32, 128), (64, 32)),
            regions=((0, 64, 0, 128), (0, 32, 0, 128)),
        ),
        "gemm-async: A 'A': found operands of float8_e4m3fn and float16; limit: ",
    ),
    "float32 operands": (
        Case(types=("float32", "float32", "float32")),
        "gemm-async: A 'A': found operands of float32 and float32; limit: ",
    ),
    "float16 sums": (
        Case(types=("float16", "float16", "float16")),
        "gemm-async: C 'C': found [64, 32] of [64, 32] float16 in scope local; limit: all of "
        "[64, n] float32 in scope local, n a multiple of 8 up to 256.",
    ),
    "sums that lie otherwise": (
        Case(layouts={"C": plain(64, 32)}),
        "gemm-async: C 'C': found layout ",
    ),
    "a plain left tile": (
        Case(layouts={"A": plain(64, 64)}),
        "gemm-async: A 'A': found layout ",
    ),
    "a plain right tile": (
        Case(layouts={"B": plain(32, 64)}),
        "gemm-async: B 'B': found layout ",
    ),
    "registers that hold something else": (
        Case(scopes=("local", "shared", "local"), layouts={"A": plain(64, 64)}),
        "gemm-async: A 'A': found layout ",
    ),
    "a right operand in registers": (
        Case(
            scopes=("shared", "local", "local"),
            layouts={"B": operand_layout(64, "bfloat16")},
            shapes=((64, 64), (64, 64), (64, 64)),
            regions=((0, 64, 0, 64), (0, 64, 0, 64)),
        ),
        "gemm-async: B 'B': found scope local; limit: scope shared or shared.dyn.",
    ),
    "a transposed left operand": (
        Case(transposed=(True, False)),
        "gemm-async: A 'A': found a left operand stored as [k, m]; limit: [m, k]: the reduction "
        "inside.",
    ),
    "8 bits as [k, n]": (
        Case(
            types=("float8_e4m3fn", "float8_e4m3fn", "float32"),
            shapes=((64, 128), (128, 128), (64, 128)),
            regions=((0, 64, 0, 128), (0, 128, 0, 128)),
            transposed=(False, True),
        ),
        "gemm-async: B 'B': found a float8_e4m3fn operand stored as [k, n]; limit: operands of 8 "
        "bits as [n, k].",
    ),
    "[k, n] without a swizzle": (
        Case(
            shapes=((64, 64), (64, 32), (64, 32)),
            layouts={"B": shared_layout("bfloat16", (64, 32), swizzled=False)},
            regions=((0, 64, 0, 64), (0, 64, 0, 32)),
            transposed=(False, True),
        ),
        "gemm-async: B 'B': found layout ",
    ),
    "too few rows": (
        Case(regions=((0, 32, 0, 64), (0, 32, 0, 64))),
        "gemm-async: A 'A': found [32, 64] by a right operand of 32 columns and depth 64; limit: "
        "64 rows by 32 columns, of one depth, a multiple of 32 bytes.",
    ),
    "depths that differ": (
        Case(regions=((0, 64, 0, 64), (0, 32, 0, 32))),
        "gemm-async: A 'A': found [64, 64] by a right operand of 32 columns and depth 32; limit: ",
    ),
    "a part that starts within a wgmma": (
        Case(regions=((0, 64, 8, 40), (0, 32, 8, 40))),
        "gemm-async: A 'A': found a region from [0, 8]; limit: rows from a multiple of 8 on, "
        "columns from a constant multiple of 32 bytes on.",
    ),
    "rows that start within a pattern": (
        Case(
            shapes=((72, 64), (32, 64), (64, 32)),
            regions=((4, 68, 0, 64), (0, 32, 0, 64)),
        ),
        "gemm-async: A 'A': found a region from [4, 0]; limit: rows from a multiple of 8 on",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_call_is_refused(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(RuntimeError) as caught:
        _device_function(case.func(), H100, "product")
    text = str(caught.value)
    assert "| wgmma (prio=20)" in text
    assert message in text, text


def test_other_targets_are_left_to_others() -> None:
    context = SimpleNamespace(target=SimpleNamespace(attrs={"arch": "sm_100a"}))
    assert is_hopper(context) == (False, "architecture sm_100a, expected sm_90a")


@pytest.mark.parametrize(
    ("shape", "swizzled", "message"),
    [
        (
            (64, 32),
            True,
            "found 64 rows of 64 bytes; limit: a multiple of 8 rows, of a multiple of 128 bytes. "
            "Instead: take larger tiles, or none of the swizzle.",
        ),
        (
            (60, 64),
            False,
            "found 60 rows of 128 bytes; limit: a multiple of 8 rows, of a multiple of 16 bytes. "
            "Instead: take larger tiles.",
        ),
    ],
)
def test_shared_layout_is_refused(shape: tuple[int, int], swizzled: bool, message: str) -> None:
    with pytest.raises(LoweringRefused) as caught:
        shared_layout("bfloat16", shape, swizzled=swizzled)
    assert str(caught.value) == f"gemm-async: a tile of {shape[0]} x {shape[1]} bfloat16: {message}"
