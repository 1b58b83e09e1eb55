"""Divisions of the numbers of warps and clusters by what is no power of two."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from cpu.hopper.checkers import passed
from crossfuse import _tvm as ir
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.lower.pipeline import round_towards_zero
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.workload import parse, prim_func

#: Workload, family, tiles. Rows of the first one's tiles are 12 blocks of 8 columns.
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "slices of whole warps": (
        "gated_ffn:M=64,K=64,N=512,L=96,dtype=bfloat16,residual=out",
        "registers",
        {"rows": 64, "columns": 96, "parts": 4, "cluster": 4},
    ),
    "slices of several warps": (
        "gemm_chain:M=100,K=64,N=256,L=144,dtype=bfloat16,bias=first+last,residual=out",
        "registers",
        {"rows": 64, "columns": 96, "parts": 2, "cluster": 2},
    ),
    "slices of rows": (
        "gemm_chain:M=63,K=64,N=192,L=144,dtype=bfloat16,residual=out",
        "registers",
        {"rows": 64, "columns": 96, "parts": 3, "cluster": 3},
    ),
    "parts through L2": (
        "gated_ffn:M=63,K=64,N=512,L=96,dtype=bfloat16,residual=out",
        "registers",
        {"rows": 64, "columns": 96, "parts": 4, "cluster": 1},
    ),
    "clusters": (
        "gated_ffn:M=127,K=64,N=384,L=96,dtype=float16,scale=last,residual=out",
        "dsm",
        {"rows": 64, "cluster": 3, "parts": 2},
    ),
}


def scheduled(text: str, family: str, tiles: dict[str, int]) -> Any:
    return FAMILIES[family].schedule(prim_func(parse(text)), tiles, "nvidia-h100")


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    passed(parse(CASES[name][0]), scheduled(*CASES[name]))


@pytest.mark.parametrize("rows", [63, 65, 127, 255])
@pytest.mark.parametrize(
    ("workload", "columns", "parts"),
    [("gated_ffn", 96, 4), ("gemm_chain", 96, 2), ("gemm_chain", 56, 4), ("gemm_chain", 40, 8)],
)
def test_tiles_lower_for_any_rows(workload: str, columns: int, parts: int, rows: int) -> None:
    text = f"{workload}:M={rows},K=64,N={parts * 64},L=144,dtype=bfloat16,residual=out"
    tiles = {"rows": 64, "columns": columns, "parts": parts, "cluster": parts}
    lower(scheduled(text, "registers", tiles))


@tvm.ir.instrument.pass_instrument
class Divisions:
    """Collects divisions by others than powers of two, where TVM lowers them."""

    def __init__(self) -> None:
        self.down: list[Any] = []
        self.towards_zero: list[Any] = []

    def run_before_pass(self, mod: Any, info: Any) -> None:
        if str(info.name).endswith("LowerIntrin"):
            for func in mod.functions.values():
                self.down += divisions(func, ir.tirx.FloorDiv, ir.tirx.FloorMod)
                self.towards_zero += divisions(func, ir.tirx.Div, ir.tirx.Mod)


def divisions(func: Any, *kinds: type) -> list[Any]:
    found: list[Any] = []
    ir.walk(func.body, *((kind, found.append) for kind in kinds))
    return [each for each in found if (b := ir.constant(each.b)) is None or b & (b - 1)]


@pytest.mark.parametrize("name", CASES)
def test_no_dividend_is_negative(name: str) -> None:
    seen = Divisions()
    with tvm.transform.PassContext(instruments=[seen]):
        lower(scheduled(*CASES[name]))
    assert seen.towards_zero
    assert seen.down == []


@T.prim_func
def branches(a: T.handle) -> None:
    A = T.match_buffer(a, (4, 256), "int32")
    T.launch_thread("blockIdx.x", 1)
    tx = T.launch_thread("threadIdx.x", 256)
    warp: T.let[T.int32] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), tx // 32, 0, 32, 32)
    lane: T.let[T.int32] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), tx % 32, 0, 32, 32)
    if warp // 4 == 0:
        A[0, tx] = (warp // 4 * 128 + tx % 128 - 128) // 3
    else:
        A[1, tx] = (warp // 4 * 128 + tx % 128 - 128) // 3
        A[2, tx] = (warp // 4 * 128 + tx % 128 - 129) // 3
        A[3, tx] = lane // 3


def test_dividends_that_may_be_negative_stay() -> None:
    """Those of threads that do not multiply, and of numbers that are not a warp's."""
    module = tvm.IRModule({"main": branches.with_attr("global_symbol", "main")})
    module = tvm.tirx.transform.BindTarget(tvm_target(device("nvidia-h100")))(module)
    func = round_towards_zero()(module)["main"]
    rounded: dict[int, type] = {}

    def store(node: Any) -> None:
        rounded[int(node.indices[0])] = type(node.value)

    ir.walk(func.body, (ir.BufferStore, store))
    down, towards_zero = ir.tirx.FloorDiv, ir.tirx.Div
    assert rounded == {0: down, 1: towards_zero, 2: down, 3: down}
