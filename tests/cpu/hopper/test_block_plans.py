"""What is decided for tiles of 256 rows: chains of whole layers, their registers and memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func, resolve

H100 = device("nvidia-h100")


@cache
def scheduled(text: str, columns: tuple[int, int], cluster: int = 4, **tiles: Any) -> Any:
    """Tiles of 256 rows, with some columns in each phase; the second reduction is split."""
    return schedule_tiled_ffn(
        prim_func(resolve(text)),
        first=TensorTiles(256, columns[0], cluster, **tiles),
        second=TensorTiles(256, columns[1], split=cluster),
        constant_weights=True,
    )


def planned(schedule: Any) -> KernelPlan:
    (programs,) = recover(only_function(schedule))
    return plan_kernel(programs, H100)


#: Workload, tiles side by side in a cluster; cluster size, columns of both phases, sums of a
#: thread, stages of left and right tiles.
LAYERS = [
    ("S1:M=256", 1, 4, (72, 112), 144, (4, 5)),
    ("S2:M=256", 1, 4, (48, 80), 96, (4, 8)),
    ("S3:M=256", 1, 4, (96, 144), 192, (4, 4)),
    ("S4:M=256", 1, 4, (72, 80), 144, (4, 5)),
    ("S5:M=256", 1, 4, (96, 80), 192, (4, 4)),
    ("S6:M=256", 1, 4, (80, 64), 160, (4, 4)),
    ("S7:M=256", 1, 4, (88, 96), 176, (4, 4)),
    ("S3:M=200", 1, 4, (96, 144), 192, (4, 4)),
    ("S1:M=512", 1, 2, (64, 96), 128, (4, 6)),
    ("S2:M=512", 1, 2, (96, 64), 192, (4, 4)),
    ("S3:M=512", 1, 2, (96, 128), 192, (4, 4)),
    ("S3:M=512", 2, 4, (96, 144), 192, (4, 4)),
    ("S4:M=512", 1, 2, (64, 64), 128, (4, 6)),
]


@pytest.mark.parametrize(("text", "across", "size", "columns", "sums", "stages"), LAYERS)
def test_whole_layers(
    text: str,
    across: int,
    size: int,
    columns: tuple[int, int],
    sums: int,
    stages: tuple[int, int],
) -> None:
    stacked = text.endswith("512")
    plan = planned(scheduled(text, columns, size // across, across=across, stacked=stacked))
    assert plan.is_persistent
    assert plan.cluster_size == size
    assert plan.clusters <= H100.resident_clusters(size)
    assert tuple(each.columns for each in plan.phases) == columns
    assert plan.accumulators == sums <= 192
    assert (plan.left.stages, plan.right.stages) == stages
    assert plan.arena.size <= H100.max_shared_bytes
    first, second = plan.phases
    # A cluster shares the rows of A, or the weights if it stands along the rows.
    if stacked:
        assert (first.left.sharers, first.rights[0].sharers) == (across, 2)
    else:
        assert (first.left.sharers, first.rights[0].sharers) == (size, 1)
    assert second.program.exchange is not None
    assert second.program.exchange.place.extent * across == size


def test_two_warpgroups_of_two_blocks() -> None:
    plan = planned(scheduled("S3:M=256", (96, 144)))
    assert (plan.consumers, plan.blocks, plan.threads) == (2, 2, 384)
    for phase in plan.phases:
        assert (phase.consumers, phase.blocks) == (2, 2)
        assert (phase.share, phase.rows) == (128, 256)
    first, _ = plan.phases
    assert [first.first_sum(*each) for each in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [0, 48, 96, 144]
    # One thread of each warpgroup raises the flag for both of its blocks.
    flags = first.raises
    assert flags is not None
    assert (flags.rows, flags.raisers, flags.down) == (256, 2, 1)


@pytest.mark.parametrize("weights", ["nk", "kn"])
def test_one_wgmma_for_gate_and_up(weights: str) -> None:
    """Their tiles lie one behind the other as one tile does, if they are stored as [n, k]."""
    text = f"gated_ffn:M=256,K=128,N=256,L=64,dtype=bfloat16,weights={weights}"
    assert planned(scheduled(text, (64, 16))).phases[0].is_one_product == (weights == "nk")


def test_boxes_lie_in_left_stages() -> None:
    plan = planned(scheduled("S3:M=256", (96, 144)))
    store = plan.phases[0].store
    assert [(each.block, each.first, each.columns, each.offset >> 10) for each in store.boxes] == [
        (0, 0, 64, 0),
        (0, 64, 32, 8),
        (1, 0, 64, 16),
        (1, 64, 32, 24),
    ]
    assert (store.page, store.pages, store.own_bytes) == (128 * 128, 2, 0)
    assert [len(each) for each in store.batches] == [2, 2]
    assert plan.left.pitch == plan.consumers * store.page
    assert plan.box_pitch == 0
    assert "boxes" not in plan.arena


@pytest.mark.parametrize("columns", range(8, 193, 8))
def test_no_box_lies_in_two_stages(columns: int) -> None:
    spec = parse("gemm:M=256,N=4096,K=4096,dtype=bfloat16,weights=nk")
    tiles = TensorTiles(rows=256, columns=columns)
    plan = planned(schedule_tiled_gemm(prim_func(spec), tiles=tiles))
    store = plan.phases[0].store
    assert sum(each.columns for each in store.boxes) == 2 * columns
    end = 0
    for box in store.boxes:
        assert box.offset >= end
        assert box.offset % 1024 == 0
        end = box.offset + box.size
        assert box.offset // store.page == (end - 1) // store.page
    assert store.pages == -(-end // store.page) <= 3
    assert store.pages <= plan.left.stages


@pytest.mark.parametrize("stages", [0, 1])
def test_no_boxes_where_a_tile_has_too_few_stages(stages: int) -> None:
    spec = parse("gemm:M=256,N=4096,K=64,dtype=bfloat16,weights=nk")
    tiles = TensorTiles(rows=256, columns=96, stages=stages)
    plan = planned(schedule_tiled_gemm(prim_func(spec), tiles=tiles))
    assert (plan.phases[0].store.boxes, plan.phases[0].store.pages) == ((), 0)


def test_what_is_received_lies_where_both_rings_were() -> None:
    """256 x 144 float32 are more than four stages of right tiles."""
    plan = planned(scheduled("S3:M=256", (96, 144)))
    left, right, received = (plan.arena[each] for each in ("left", "right", "received"))
    assert received.size == 256 * 144 * 4 > plan.right.size
    assert (received.offset, left.end) == (left.offset, right.offset)
    assert received.end <= right.end
    assert (left.size, right.size) == (plan.left.size, plan.right.size)
    for name in ("exchange_barriers", "barriers"):
        assert plan.arena[name].offset >= right.end


@pytest.mark.parametrize(
    "text",
    [
        *(f"S{number}:M=256" for number in range(1, 5)),
        "gated_ffn:M=256,K=4096,N=11008,L=4096,dtype=bfloat16,"
        "scale=first+last,bias=first+last,residual=out",
    ],
)
def test_nvcc_compiles_without_spills(text: str) -> None:
    columns = next((each[3] for each in LAYERS if each[0] == text), (96, 144))
    (usage,) = compile_cubin(lower(scheduled(text, columns)).image.cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.advisories) == (0, 0, ())
