"""How tiles are cut into the boxes that TMA stores."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cpu.hopper.test_plan import planned
from crossfuse.hardware import device
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.plan.tiles import StorePlan
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import TensorMap
from crossfuse.planner.kernels.phase import box_widths
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func


def store_of(columns: int, width: int = 4096, **tiles: int) -> StorePlan:
    """The plan of a product's tiles."""
    text = f"M=4096,N={width},K=64,dtype=bfloat16,weights=nk"
    return planned(text, columns=columns, **tiles).phases[0].store


def phases(columns: int) -> tuple[TileProgram, ...]:
    """A gated FFN in one kernel, with tiles of some columns in its first phase."""
    spec = parse("gated_ffn:M=128,K=128,N=1152,L=128,dtype=bfloat16")
    tiles = TensorTiles(128, columns, 4), TensorTiles(128, 128, split=4)
    sch: Any = schedule_tiled_ffn(prim_func(spec), first=tiles[0], second=tiles[1])
    return recover(only_function(sch))[0]


def ffn(columns: int) -> KernelPlan:
    return plan_kernel(phases(columns), device("nvidia-h100"))


@pytest.mark.parametrize(
    ("columns", "staged", "alone"),
    [
        (8, [8], [8]),
        (16, [16], [16]),
        (24, [16, 8], [16, 8]),
        (32, [32], [32]),
        (40, [32, 8], [32, 8]),
        (48, [32, 16], [16, 16, 16]),
        (64, [64], [64]),
        (72, [64, 8], [64, 8]),
        (80, [64, 16], [16] * 5),
        (88, [64, 16, 8], [64, 16, 8]),
        (96, [64, 32], [32, 32, 32]),
        (120, [64, 32, 16, 8], [64, 32, 16, 8]),
        (128, [64, 64], [64, 64]),
        (256, [64] * 4, [64] * 4),
    ],
)
def test_tiles_are_cut_into_boxes(columns: int, staged: list[int], alone: list[int]) -> None:
    """The fewest where all have room; others of one width if it divides the tile."""
    assert list(box_widths(columns, staged=True)) == staged
    assert list(box_widths(columns, staged=False)) == alone


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_boxes_make_up_the_tile(columns: int, staged: bool) -> None:
    widths = box_widths(columns, staged=staged)
    assert sum(widths) == columns
    assert list(widths) == sorted(widths, reverse=True)
    assert set(widths) <= {64, 32, 16, 8}
    # Narrow boxes are in shared memory as they are, eight rows in 128 bytes: one is enough.
    assert widths.count(8) == columns // 8 % 2


@pytest.mark.parametrize("columns", range(8, 257, 8))
def test_boxes_of_a_product_go_round_two_slots(columns: int) -> None:
    store = store_of(columns)
    boxes = store.boxes
    assert boxes[0].first == 0
    assert boxes[-1].first + boxes[-1].columns == columns
    for box, following in pairwise(boxes):
        assert box.first + box.columns == following.first
    assert store.slots == min(2, len(boxes))
    assert store.slot_bytes == sum(each.size for each in boxes[:2])
    for number, box in enumerate(boxes):
        assert box.offset == [0, boxes[0].size][number % 2]
        assert box.size == 64 * box.pitch <= boxes[number % 2].size
        assert box.offset % 1024 == 0
        assert box.map.box == (box.columns, 64)
        # A row of 16 bytes is no swizzle's span.
        assert box.map.swizzle == (box.pitch if box.columns > 8 else 0)
    if len(boxes) > 2:
        assert store.batches == tuple((each,) for each in boxes)
    else:
        assert store.batches == (boxes,)


@pytest.mark.parametrize(
    ("columns", "pending"),
    [
        (64, [0]),
        (72, [0]),
        (128, [0]),  # both have room: they leave together
        (88, [0, 1, 1]),  # the next tile begins with the slot that this one ends with
        (120, [1, 1, 1, 1]),
        (192, [0, 1, 1]),
        (256, [1, 1, 1, 1]),
    ],
)
def test_what_is_waited_for_before_a_slot_is_filled(columns: int, pending: list[int]) -> None:
    store = store_of(columns)
    assert [store.pending(batch) for batch, _ in enumerate(store.batches)] == pending


@pytest.mark.parametrize(
    ("width", "columns", "box", "swizzle"),
    [
        (256, 256, 64, 128),
        (192, 192, 64, 128),
        (96, 96, 32, 64),
        (48, 48, 16, 32),
        (8, 8, 8, 0),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stores_by_tma(width: int, columns: int, box: int, swizzle: int, dtype: str) -> None:
    plan = planned(f"M=128,N={width},K=64,dtype={dtype},weights=nk", columns=columns)
    wanted = TensorMap("out_map", "out", (width, 128), (2 * width,), (box, 64), swizzle)
    store = plan.phases[0].store
    assert store.maps == (wanted,)
    assert [each.columns for each in store.boxes] == [box] * (columns // box)
    assert plan.tensor_maps[2] == wanted


def test_each_width_has_a_map_of_its_own() -> None:
    plan = planned("M=128,N=264,K=64,dtype=bfloat16,weights=nk", columns=88)
    maps = plan.phases[0].store.maps
    assert plan.tensor_maps[2:] == maps
    assert [(each.name, each.box, each.swizzle) for each in maps] == [
        ("out_map", (64, 64), 128),
        ("out_map1", (16, 64), 32),
        ("out_map2", (8, 64), 0),
    ]
    assert {(each.buffer, each.extents, each.strides) for each in maps} == {
        ("out", (264, 128), (528,))
    }


def test_maps_of_a_staged_tile_are_not_those_of_its_loads() -> None:
    plan = ffn(88)
    first, second = plan.phases
    assert [each.name for each in first.store.maps] == ["hidden_map", "hidden_map1", "hidden_map2"]
    assert second.left.map.name == "hidden_map3"
    names = [each.name for each in plan.tensor_maps]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("columns", [8, 24, 48, 72, 88, 96, 128])
def test_all_boxes_of_a_staged_tile_leave_at_once(columns: int) -> None:
    plan = ffn(columns)
    store = plan.phases[0].store
    assert store.batches == (store.boxes,)
    assert store.pending(0) == 0
    assert store.slot_bytes == plan.box_pitch == 64 * 2 * columns
    assert plan.arena["boxes"].size == plan.consumers * plan.box_pitch
    for box, following in pairwise(store.boxes):
        assert box.offset + box.size == following.offset


def test_boxes_of_a_warpgroup_have_one_place_in_all_phases() -> None:
    """Else the last boxes of the first phase would lie where another warpgroup stores the next."""
    first, second = phases(72)
    plan = plan_kernel((first, replace(second, exchange=None)), device("nvidia-h100"))
    narrow, wide = (each.store.slot_bytes for each in plan.phases)
    assert narrow == 9 << 10
    assert wide == plan.box_pitch == 16 << 10
    assert plan.arena["boxes"].size == 2 * plan.box_pitch


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("M=128,N=256,K=64,dtype=bfloat16,out=float32", {}),
        ("M=128,N=256,K=128,dtype=float8_e4m3fn", {}),
        ("M=128,N=100,K=64,dtype=bfloat16", {}),  # rows of 200 bytes
        ("M=128,N=63,K=64,dtype=bfloat16", {}),
        ("M=128,N=100,K=64,dtype=bfloat16", {"columns": 72}),
    ],
)
def test_stores_of_single_elements(text: str, tiles: dict[str, int]) -> None:
    plan = planned(f"{text},weights=nk", **tiles)
    store = plan.phases[0].store
    assert (store.boxes, store.maps, store.slot_bytes) == ((), (), 0)
    assert len(plan.tensor_maps) == 2
    assert "boxes" not in [each.name for each in plan.arena.regions]
