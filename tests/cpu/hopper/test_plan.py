"""What is decided for a tile program before any of its kernel is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest

from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import TensorMap
from crossfuse.planner.kernels.memory import Arena
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func

H100 = device("nvidia-h100")
LARGE = "M=4096,N=4096,K=4096,dtype=bfloat16"


def planned(text: str, on: Any = H100, **tiles: int) -> KernelPlan:
    func = prim_func(parse(f"gemm:{text}"))
    return plan_kernel(
        recover(only_function(schedule_tiled_gemm(func, tiles=TensorTiles(**tiles))))[0], on
    )


@pytest.mark.parametrize(
    ("rows", "columns", "consumers", "threads"),
    [(64, 256, 1, 256), (64, 8, 1, 256), (128, 256, 2, 384), (192, 192, 3, 512)],
)
def test_a_warpgroup_for_64_rows(rows: int, columns: int, consumers: int, threads: int) -> None:
    plan = planned(f"{LARGE},weights=nk", rows=rows, columns=columns)
    assert (plan.consumers, plan.threads) == (consumers, threads)
    (phase,) = plan.phases
    assert (phase.columns, phase.accumulators) == (columns, columns // 2)
    assert plan.accumulators == columns // 2


@pytest.mark.parametrize(
    ("rows", "columns", "out", "left", "right"),
    [
        (128, 256, "bfloat16", 4, 4),  # 48 KiB a step, 32 KiB of boxes
        (128, 256, "float32", 4, 5),
        (128, 128, "bfloat16", 4, 8),
        (64, 256, "bfloat16", 5, 5),
        (192, 192, "bfloat16", 3, 3),
        (192, 192, "float32", 4, 5),
        (64, 64, "bfloat16", 12, 12),  # as many as there are at most
        (64, 8, "bfloat16", 12, 12),
    ],
)
def test_as_many_stages_as_fit(rows: int, columns: int, out: str, left: int, right: int) -> None:
    """Right tiles get as many as they can, left ones what is left beyond four of them."""
    plan = planned(f"{LARGE},out={out},weights=nk", rows=rows, columns=columns)
    assert (plan.left.stages, plan.right.stages) == (left, right)
    assert (plan.left.pitch, plan.right.pitch) == (rows * 128, columns * 128)
    assert plan.arena.size <= H100.max_shared_bytes == 232448
    if right < 12:
        fewest = min(right + 1, 4)
        more = (fewest - left) * plan.left.pitch + plan.right.pitch
        assert plan.arena.size + more > H100.max_shared_bytes
    if left < right:
        assert plan.arena.size + plan.left.pitch > H100.max_shared_bytes


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_that_were_asked_for(stages: int) -> None:
    plan = planned(f"{LARGE},weights=nk", stages=stages)
    assert plan.left.stages == plan.right.stages == stages
    assert plan.arena["left"].size == plan.left.size == stages * 128 * 128
    assert plan.arena["right"].size == plan.right.size == stages * 256 * 128
    assert plan.arena["barriers"].size == 2 * 16 * stages


def test_a_device_with_less_shared_memory() -> None:
    half = replace(H100, name="half", max_shared_bytes=131200)
    plan = planned(f"{LARGE},weights=nk", half)
    assert plan.left.stages == plan.right.stages == 2
    less = replace(half, max_shared_bytes=131072)
    with pytest.raises(LoweringRefused) as caught:
        planned(f"{LARGE},weights=nk", less)
    assert str(caught.value).startswith(
        "shared-memory: kernel: found 131136 bytes for 2 stages of 49152 bytes; limit: 131072 "
        "bytes on half."
    )


@pytest.mark.parametrize("weights", ["nk", "kn"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "tiles",
    [
        {},
        {"rows": 64, "columns": 72},
        {"rows": 192, "columns": 184, "cluster": 4},
        {"rows": 128, "columns": 8, "stages": 7},
        {"rows": 64, "columns": 48, "cluster": 1, "stages": 2},
    ],
)
def test_regions_of_shared_memory(tiles: dict[str, int], out: str, weights: str) -> None:
    plan = planned(f"{LARGE},out={out},weights={weights}", **tiles)
    (phase,) = plan.phases
    regions = plan.arena.regions
    boxes = ["boxes"] if phase.store.boxes else []
    assert [each.name for each in regions] == [*boxes, "left", "right", "barriers"]
    assert regions[0].offset == 0
    for region, following in pairwise(regions):
        assert region.end <= following.offset
    assert plan.arena.size == regions[-1].end <= H100.max_shared_bytes
    # Swizzle patterns start on multiples of their size, in every stage and every box.
    assert all(each.offset % 1024 == 0 for each in regions if each.name != "barriers")
    (right,) = phase.rights
    assert phase.left.size % 1024 == right.size % 1024 == 0
    assert (plan.left.pitch, plan.right.pitch) == (phase.left.size, right.size)
    assert plan.arena["barriers"].offset % 8 == 0
    assert plan.arena["left"].size == plan.left.stages * phase.left.size
    assert plan.arena["right"].size == plan.right.stages * right.size
    assert plan.arena["barriers"].size == 2 * 8 * (plan.left.stages + plan.right.stages)
    if phase.store.boxes:
        assert plan.box_pitch == phase.store.slot_bytes
        assert plan.arena["boxes"].size == plan.consumers * plan.box_pitch
        assert plan.box_pitch % 1024 == 0


def test_an_arena_aligns_its_regions() -> None:
    arena = Arena().with_region("a", 5, 8).with_region("b", 3, 1024).with_region("c", 16, 8)
    assert [(each.name, each.offset, each.end) for each in arena.regions] == [
        ("a", 0, 5),
        ("b", 1024, 1027),
        ("c", 1032, 1048),
    ]
    assert (Arena().size, arena.size, arena["b"].size) == (0, 1048, 3)


@pytest.mark.parametrize(
    ("tiles", "weights", "sharers", "box", "copies"),
    [
        ({"cluster": 1}, "nk", 1, (64, 256), 1),
        ({"cluster": 2}, "nk", 2, (64, 128), 1),
        ({"cluster": 4}, "nk", 4, (64, 64), 1),
        ({"cluster": 4, "columns": 96}, "nk", 4, (64, 24), 1),
        # Parts of 20 rows would not start on a pattern of 8: everybody loads everything.
        ({"cluster": 4, "columns": 80}, "nk", 1, (64, 80), 1),
        ({"cluster": 2, "columns": 8}, "nk", 1, (64, 8), 1),
        # As [k, n], a part is whole boxes, of 64 columns or those with which less is loaded.
        ({"cluster": 1}, "kn", 1, (64, 64), 4),
        ({"cluster": 2}, "kn", 2, (64, 64), 2),
        ({"cluster": 4}, "kn", 4, (64, 64), 1),
        ({"cluster": 2, "columns": 192}, "kn", 2, (32, 64), 3),
        ({"cluster": 2, "columns": 64}, "kn", 2, (32, 64), 1),
        ({"cluster": 1, "columns": 80}, "kn", 1, (32, 64), 3),
        ({"cluster": 1, "columns": 24}, "kn", 1, (32, 64), 1),
        ({"cluster": 1, "columns": 48}, "kn", 1, (64, 64), 1),
        ({"cluster": 1, "columns": 16}, "kn", 1, (16, 64), 1),
        ({"cluster": 4, "columns": 200}, "kn", 4, (64, 64), 1),
    ],
)
def test_ctas_of_a_cluster_share_the_right_operand(
    tiles: dict[str, int], weights: str, sharers: int, box: tuple[int, int], copies: int
) -> None:
    plan = planned(f"{LARGE},weights={weights}", **tiles)
    (phase,) = plan.phases
    (right,) = phase.rights
    assert phase.left.sharers == plan.left.sharers == 1
    assert (right.sharers, right.map.box, right.copies) == (sharers, box, copies)
    assert [each.tag for each in right.shared_by] == (["cluster.x"] if sharers > 1 else [])
    assert plan.right.sharers == sharers
    assert right.k_major == (weights == "nk")
    assert right.copies * right.sharers * right.box_bytes == right.size
    assert right.box_bytes == prod(box) * 2


def test_the_left_operand_is_loaded_whole() -> None:
    plan = planned(f"{LARGE},weights=nk", rows=192, columns=64, cluster=4)
    left = plan.phases[0].left
    assert (left.map.box, left.copies, left.boxes) == ((64, 192), 1, 1)
    assert left.size == plan.left.pitch == 192 * 128


def test_tensor_maps_are_of_the_stored_tensors() -> None:
    plan = planned("M=200,N=136,K=80,dtype=float16,weights=kn", columns=128, cluster=1)
    assert plan.tensor_maps == (
        TensorMap("A_map", "A", (80, 200), (160,), (64, 128), 128),
        TensorMap("B_map", "B", (136, 80), (272,), (64, 64), 128),
        TensorMap("out_map", "out", (136, 200), (272,), (64, 64), 128),
    )


@pytest.mark.parametrize(
    ("text", "tiles", "streamed"),
    [
        (LARGE, {}, (False, False)),  # 16 x 16 clusters: each row and each column has many
        ("M=4096,N=256,K=128,dtype=bfloat16", {}, (True, False)),
        ("M=128,N=2048,K=128,dtype=bfloat16", {"rows": 128}, (False, True)),
        ("M=256,N=256,K=128,dtype=bfloat16", {"rows": 128}, (True, True)),  # a single cluster
    ],
)
def test_tiles_of_one_cluster_alone_are_streamed(
    text: str, tiles: dict[str, int], streamed: tuple[bool, bool]
) -> None:
    plan = planned(f"{text},weights=nk", **tiles)
    operands = plan.phases[0].operands
    assert tuple(each.streamed for each in operands) == streamed
    assert [each.map.fetch for each in operands] == [256 if each else 128 for each in streamed]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_fp8_have_128_elements(dtype: str) -> None:
    plan = planned(f"M=256,N=256,K=512,dtype={dtype},out=float16,weights=nk", rows=128)
    (phase,) = plan.phases
    assert phase.left.map == TensorMap("A_map", "A", (512, 256), (512,), (128, 128), 128, 256)
    assert phase.rights[0].map == TensorMap("B_map", "B", (512, 256), (512,), (128, 128), 128, 256)
    assert plan.left.pitch + plan.right.pitch == (128 + 256) * 128


@pytest.mark.parametrize(
    ("text", "tiles", "clusters"),
    [
        (LARGE, {"cluster": 1}, 132),
        (LARGE, {"cluster": 2}, 66),
        # SMs come in groups that a cluster cannot leave.
        (LARGE, {"cluster": 4}, 30),
        (LARGE, {"cluster": 8}, 15),
        (LARGE, {"cluster": 16}, 7),
        ("M=512,N=512,K=64,dtype=bfloat16", {"rows": 128}, 4),
        ("M=64,N=64,K=64,dtype=bfloat16", {}, 1),
        ("M=8448,N=256,K=64,dtype=bfloat16", {"cluster": 1}, 66),
        ("M=8449,N=512,K=64,dtype=bfloat16", {"cluster": 1}, 132),
    ],
)
def test_clusters_that_fit_the_device(text: str, tiles: dict[str, int], clusters: int) -> None:
    plan = planned(f"{text},weights=nk", **tiles)
    assert plan.clusters == clusters
    program = plan.phases[0].program
    assert plan.cluster_size == program.cluster_size
    assert plan.clusters == min(program.tiles, H100.resident_clusters(program.cluster_size))
    few = planned(f"{text},weights=nk", replace(H100, sms=1), **tiles)
    assert few.clusters == 1
