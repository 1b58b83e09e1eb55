"""Images of small products: launches, memory, registers, and what nvcc makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse.hardware import device
from crossfuse.lower.extract import Lowered, lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func


def scheduled(text: str, **tiles: int) -> Any:
    return schedule_tiled_gemm(prim_func(parse(f"gemm:{text}")), tiles=TensorTiles(**tiles))


def lowered(text: str, name: str = "main", **tiles: int) -> Lowered:
    return lower(scheduled(text, **tiles), name=name)


def image_of(text: str, **tiles: int) -> KernelImage:
    return lowered(text, **tiles).image


@pytest.mark.parametrize(
    ("rows", "threads"), [(64, 256), (128, 384), (192, 512)], ids=["one", "two", "three"]
)
def test_launch(rows: int, threads: int) -> None:
    image = image_of("M=384,N=128,K=64,dtype=float16,weights=nk", rows=rows, cluster=2)
    (launch,) = image.launches
    assert launch.symbol == "main_kernel"
    assert launch.block == (threads, 1, 1)
    assert launch.cluster == (2, 1, 1)
    assert launch.grid == (-(-384 // (2 * rows)) * 2, 1, 1)
    assert launch.arguments == ("A_map", "B_map", "out_map")
    assert tuple(each.name for each in launch.tensor_maps) == launch.arguments


def test_names_and_shared_memory() -> None:
    result = lowered("M=64,N=64,K=64,dtype=float16", name="product", stages=2)
    (launch,) = result.image.launches
    assert result.image.name == "product"
    placements = result.shared_memory.placements
    assert {each.name for each in placements} == {"left", "right", "boxes", "barriers"}
    assert result.shared_memory.total == launch.dynamic_shared_bytes
    assert launch.dynamic_shared_bytes == 2 * 2 * 64 * 128 + 64 * 128 + 2 * 2 * 16
    assert [(each.name, each.output) for each in result.image.buffers] == [
        ("A", False),
        ("B", False),
        ("out", True),
    ]


@pytest.mark.parametrize(
    ("text", "tma"),
    [
        ("M=128,N=64,K=64,dtype=bfloat16", True),
        ("M=200,N=80,K=64,dtype=float16", True),
        ("M=128,N=63,K=64,dtype=bfloat16", False),
        ("M=128,N=24,K=64,dtype=bfloat16", True),
        ("M=128,N=100,K=64,dtype=bfloat16", False),  # rows of 200 bytes
        ("M=128,N=64,K=64,dtype=bfloat16,out=float32", False),
    ],
)
def test_stores(text: str, tma: bool) -> None:
    image = image_of(f"{text},weights=nk")
    assert image.launches[0].arguments[2] == ("out_map" if tma else "out")


@pytest.mark.parametrize(("rows", "registers"), [(64, (0, 0)), (128, (40, 232)), (192, (32, 160))])
def test_registers_move_to_who_multiplies(rows: int, registers: tuple[int, int]) -> None:
    schedule = scheduled("M=384,N=128,K=64,dtype=bfloat16,weights=nk", rows=rows)
    (programs,) = recover(only_function(schedule))
    assert plan_kernel(programs, device("nvidia-h100")).registers == registers


@pytest.mark.parametrize("rows", [8448, 8704])
def test_few_clusters_go_through_many_tiles(rows: int) -> None:
    """Tiles of 256 x 256 for each cluster of two; the device has room for 66 clusters."""
    image = image_of(f"M={rows},N=512,K=64,dtype=bfloat16,weights=nk")
    assert image.launches[0].grid == (132, 1, 1)


def test_the_same_schedule_gives_the_same_text() -> None:
    text = "M=200,N=100,K=80,dtype=bfloat16,weights=nk,act=silu"
    assert image_of(text) == image_of(text)


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("M=256,N=256,K=128,dtype=bfloat16,weights=nk", {}),
        ("M=200,N=184,K=128,dtype=float16,weights=kn,out=float32,act=silu", {"rows": 192}),
    ],
)
def test_nvcc_compiles_without_spills(text: str, tiles: dict[str, int]) -> None:
    (usage,) = compile_cubin(image_of(text, **tiles).cuda).resources
    assert usage.kernel == "main_kernel"
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
    assert usage.registers <= 168
