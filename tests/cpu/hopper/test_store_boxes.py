"""Tiles that leave in boxes of several widths, by both checkers, and faults planted in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cpu.hopper.checkers import emulated, passed
from cpu.hopper.instructions import MEET
from cpu.hopper.persistent import BOX, LANDED
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs

WIDE = r"tvm_builtin_ptx_stmatrix_sync_aligned_m8n8_x4\w+"
NARROW = r"tvm_builtin_ptx_stmatrix_sync_aligned_m8n8_x2\w+"
READ = r"tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_read_\d"
FFN = "gated_ffn:M=64,K=64,N=384,L=64,dtype=bfloat16"

#: Workloads in one kernel, and the tiles of the first phase.
CHAINS = {
    "gated, 8": ("gated_ffn:M=64,K=64,N=64,L=64,dtype=float16", {"columns": 8}),
    "gated, 24": ("gated_ffn:M=64,K=64,N=192,L=64,dtype=bfloat16", {"columns": 24}),
    "gated, 72": (FFN, {"columns": 72}),  # the last tile has 24 of its columns
    "gated, 88": (FFN, {"columns": 88}),  # and here 32
    "gated, 88, one row": ("gated_ffn:M=1,K=64,N=384,L=64,dtype=bfloat16", {"columns": 88}),
    "gated, 72, 100 rows": ("gated_ffn:M=100,K=64,N=384,L=72,dtype=bfloat16", {"columns": 72}),
    "gated, 120, clusters": (
        "gated_ffn:M=64,K=72,N=512,L=64,dtype=float16",
        {"columns": 120, "cluster": 2},
    ),
    "chain, 24": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=relu", {"columns": 24}),
    "chain, 72": ("gemm_chain:M=100,K=64,N=256,L=80,dtype=float16,act=gelu", {"columns": 72}),
    "chain, 88": ("gemm_chain:M=1,K=64,N=256,L=64,dtype=bfloat16", {"columns": 88}),
    "chain, 200": ("gemm_chain:M=64,K=64,N=256,L=64,dtype=bfloat16", {"columns": 200}),
}
#: Products, whose boxes go round two slots.
PRODUCTS = {
    "8": ("M=64,N=8,K=64,dtype=bfloat16", {}),
    "24": ("M=100,N=24,K=64,dtype=float16", {}),
    "72": ("M=64,N=144,K=64,dtype=bfloat16", {"columns": 72}),
    "88, tails": ("M=100,N=200,K=72,dtype=bfloat16", {"columns": 88}),
    "120, one row": ("M=1,N=248,K=64,dtype=float16", {"columns": 120}),
    "three warpgroups": ("M=192,N=184,K=64,dtype=bfloat16", {"rows": 192, "columns": 184}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_staged_tiles(name: str) -> None:
    text, tiles = CHAINS[name]
    image = passed(
        parse(text), schedule_tiled_ffn(prim_func(parse(text)), first=TensorTiles(**tiles))
    )
    assert image.launches[0].cooperative
    assert "stmatrix.sync.aligned.m8n8.x2" in image.cuda


@pytest.mark.parametrize("name", PRODUCTS)
def test_tiles_of_a_product(name: str) -> None:
    text, tiles = PRODUCTS[name]
    spec = parse(f"gemm:{text},weights=nk")
    image = passed(spec, schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(**tiles)))
    assert "stmatrix.sync.aligned.m8n8.x2" in image.cuda


@cache
def products(columns: int) -> KernelImage:
    """Four tiles of a product, all computed by one CTA."""
    spec = parse(PRODUCT.format(2 * columns))
    tiles = TensorTiles(rows=64, columns=columns, cluster=1, stages=2)
    one = replace(device("nvidia-h100"), sms=1)
    return lower(schedule_tiled_gemm(prim_func(spec), tiles=tiles), one).image


PRODUCT = "gemm:M=128,N={},K=64,dtype=bfloat16,weights=nk"


@pytest.mark.parametrize("columns", [56, 72, 88, 120])
def test_slots_are_filled_again_by_the_next_tile(columns: int) -> None:
    spec = parse(PRODUCT.format(2 * columns))
    assert products(columns).launches[0].grid == (1, 1, 1)
    emulated(spec, products(columns), random_inputs(spec), orders=3)


@cache
def persistent() -> KernelImage:
    """Tiles of 72 columns: boxes of 64 and of 8."""
    first = TensorTiles(64, 72, 2, stages=2)
    second = TensorTiles(64, 64, split=2, stages=2)
    return lower(schedule_tiled_ffn(prim_func(parse(FFN)), first=first, second=second)).image


def changed(name: str, position: int, by: str, index: int) -> KernelImage:
    return change_argument(persistent(), name, position, by, index)


FAULTS: dict[str, tuple[Callable[[], KernelImage], str, str]] = {
    "eight columns are not staged": (
        lambda: drop_call(persistent(), NARROW),
        "async-race",
        "that nothing was stored to",
    ),
    "sixteen columns are not staged": (
        lambda: drop_call(persistent(), WIDE, -1),
        "async-race",
        "that nothing was stored to",
    ),
    "eight columns are staged as sixteen": (
        lambda: changed(NARROW, 0, "{} + (threadIdx.x & 15) * 16", 0),
        "async-race",
        "that nothing was stored to",
    ),
    "the narrow box is not copied": (
        lambda: drop_call(persistent(), BOX, 1),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "the wide box is not copied": (
        lambda: drop_call(persistent(), BOX, 0),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "the narrow box has the wide one's map": (
        lambda: changed(BOX, 0, "(void*)&hidden_map", 1),
        "async-race|race|out-of-bounds",
        "",
    ),
    "the narrow box goes to its neighbour's columns": (
        lambda: changed(BOX, 1, "{} + 8", 1),
        "race",
        "",
    ),
    "a flag raised while boxes are copied": (
        lambda: drop_call(persistent(), LANDED),
        "race",
        "the copy is not waited for",
    ),
}


def found_in(image: KernelImage, spec: Any, orders: int = 2) -> tuple[list[Any], str]:
    """Findings, and what is wrong with the result ("" if nothing)."""
    inputs = random_inputs(spec)
    report = emulate(image, inputs, orders=orders, max_findings=32)
    try:
        check(spec, inputs, report.outputs["out"])
    except Exception as error:
        return list(report.findings), str(error)
    return list(report.findings), ""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_staged_boxes_is_caught(name: str) -> None:
    make, kind, detail = FAULTS[name]
    findings, _ = found_in(make(), parse(FFN))
    named = [str(each) for each in findings if each.kind in kind.split("|")]
    assert any(detail in each for each in named), [str(each) for each in findings]


@pytest.mark.slow
def test_the_right_kernel_is_clean() -> None:
    assert found_in(persistent(), parse(FFN), orders=3) == ([], "")


@pytest.mark.parametrize(("name", "index"), [(READ, 0), (READ, 2), (MEET, 4)])
def test_a_slot_that_is_filled_too_early(name: str, index: int) -> None:
    """Three boxes: the third one and the next tile's first one are for the first one's slot.

    One thread waits until it has been read, and the others for that thread.
    """
    spec = parse(PRODUCT.format(2 * 88))
    findings, _ = found_in(drop_call(products(88), name, index), spec, orders=3)
    assert any("a store overwrites what a copy still reads" in each.detail for each in findings)


@pytest.mark.slow
def test_a_box_from_the_wrong_slot() -> None:
    spec = parse(PRODUCT.format(2 * 88))
    findings, wrong = found_in(change_argument(products(88), BOX, 3, "{} - 8192", 1), spec)
    assert findings or wrong
