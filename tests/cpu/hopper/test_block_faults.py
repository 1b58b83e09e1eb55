"""Faults planted in kernels whose boxes lie in the stages that were multiplied last."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from cpu.hopper.checkers import caught, emulated
from cpu.hopper.instructions import MEET, PUSH, WAIT
from cpu.hopper.persistent import GUARD, LANDED, PRODUCTS, unguarded
from cpu.hopper.planting import all_changed
from crossfuse.emulate.cuda import drop_call
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import WorkloadSpec, parse, prim_func, random_inputs

SPECS = {
    "product": parse("gemm:M=512,N=192,K=192,dtype=bfloat16,weights=nk"),
    "ffn": parse("gated_ffn:M=256,K=128,N=256,L=64,dtype=bfloat16"),
    "turns": parse("gated_ffn:M=256,K=128,N=256,L=64,dtype=bfloat16"),
}
FILL = r"tvm_builtin_ptx_stmatrix_sync_aligned_m8n8_x4\w+"
READ = r"tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_read_0"
HAND_BACK = r"tvm_builtin_ptx_mbarrier_arrive_nocount_arrive_shared_b64"


@cache
def right(name: str) -> KernelImage:
    """Four tiles of a product that one CTA computes, of three steps each; or a small FFN.

    In "turns" its phases are kernels, and one cluster computes all tiles of the first.
    """
    few = partial(replace, device("nvidia-h100"))
    if name != "product":
        turns = name == "turns"
        first = TensorTiles(
            rows=256, columns=32 if turns else 64, cluster=2, stages=2, stacked=False
        )
        second = TensorTiles(columns=64, split=2, stages=2)
        func = prim_func(SPECS[name])
        schedule = schedule_tiled_ffn(func, first=first, second=second, staged=not turns)
        return lower(schedule, few(sms=2) if turns else few()).image
    tiles = TensorTiles(rows=256, columns=96, cluster=1, stages=3)
    return lower(schedule_tiled_gemm(prim_func(SPECS[name]), tiles=tiles), few(sms=1)).image


def planted(name: str, pattern: str, by: str) -> KernelImage:
    """Every place of the text that fits changed."""
    return all_changed(right(name), pattern, by)


def spec_of(name: str) -> WorkloadSpec:
    return SPECS[name]


#: Kernel, the fault, and what is found; None: the result is wrong.
FAULTS: dict[str, tuple[str, Callable[[str], KernelImage], str | None]] = {
    "stages handed back while their boxes are read": (
        "product",
        lambda name: drop_call(right(name), READ, 0),
        "async-race",
    ),
    "peers are told before boxes have left": (
        "turns",
        lambda name: drop_call(right(name), MEET, 3),
        "async-race",
    ),
    "a stage handed back before boxes are in it": (
        "product",
        lambda name: planted(name, r"if \(step(_\d)? == 1\)", "if (true)"),
        None,
    ),
    "a stage with boxes is not handed back": (
        "product",
        lambda name: drop_call(right(name), HAND_BACK, -1),
        "deadlock",
    ),
    "boxes filled while a tile is multiplied": (
        "product",
        lambda name: drop_call(right(name), PRODUCTS, 0),
        "async-race",
    ),
    "boxes of the second block where those of the first are read": (
        "product",
        lambda name: planted(name, r"int page_1 = .*;", "int page_1 = page;"),
        "async-race",
    ),
    "boxes at the rows of the first block": (
        "product",
        lambda name: planted(name, r"( \* 128\)\)? - )64\)", r"\g<1>128)"),
        None,
    ),
    "the rows of the first block multiplied twice": (
        "product",
        lambda name: planted(name, r"\+ 51[248]\)", "+ 0)"),
        None,
    ),
    "the warm-up fills boxes": (
        "ffn",
        lambda name: unguarded(right(name), FILL),
        "async-race",
    ),
    "a flag raised while boxes are copied": (
        "ffn",
        lambda name: drop_call(right(name), LANDED),
        "race",
    ),
    "the second block's part is not sent": (
        "ffn",
        lambda name: drop_call(right(name), PUSH, -1),
        "deadlock",
    ),
    "nobody waits until left tiles are used up": (
        "ffn",
        lambda name: drop_call(right(name), WAIT, -1),
        "async-race",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_right_kernel_is_clean(name: str) -> None:
    emulated(spec_of(name), right(name), random_inputs(spec_of(name)), orders=3)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    kernel, make, kind = FAULTS[name]
    caught(spec_of(kernel), make(kernel), kind)


def test_the_warm_up_fills_no_stages() -> None:
    """Tiles are on their way there."""
    text = right("ffn").cuda
    body = text[text.rindex("__global__") :]
    fills = [each.start() for each in re.finditer(FILL, body)]
    assert len(fills) == 2 * 64 // 16
    for each in fills:
        assert GUARD in body[body.rindex("if (", 0, each) : each]


def test_a_warpgroup_meets_before_its_first_box() -> None:
    """Rows of a box lie where another warp's rows of the left tile are."""
    text = right("product").cuda
    body = text[text.rindex("__global__") :]
    multiplied = re.search(PRODUCTS, body).start()
    assert re.search(MEET, body[multiplied : re.search(FILL, body).start()])
