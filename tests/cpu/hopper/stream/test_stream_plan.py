"""What the plan of a stream decides, and what its kernel is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpu.hopper.stream.attention import Attention, attention
from cpu.hopper.stream.test_attention import SMALL
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, plan_stream
from crossfuse.lower.hopper.stream.program import Kind
from crossfuse.lower.hopper.stream.recover.function import recover_streams
from crossfuse.runtime import compile_cubin

R1 = Attention(
    batch=8, heads=32, kv_heads=32, rows=2048, keys=2048, depth=128, tile=(128, 128), causal=True
)
R2 = Attention(batch=16, heads=12, kv_heads=12, rows=512, keys=512, tile=(128, 128))


def planned(case: Attention) -> StreamPlan:
    (program,) = recover_streams(attention(case))
    return plan_stream(program, device("nvidia-h100"))


def test_scores_are_made_once() -> None:
    plan = planned(R1)
    kinds = [(each.name, each.kind) for each in plan.program.steps]
    assert kinds[:3] == [("m_old", Kind.ROW), ("mask", Kind.MASK), ("m", Kind.TOP)]
    assert sum(kind is Kind.TILE for _, kind in kinds) == 1
    assert plan.registers.count == 1
    assert [each.name for each in plan.registers.deferred] == ["s"]


def test_elements_of_positions_come_before_their_masks() -> None:
    plan = planned(replace(R1, alibi=True, window=512, rows=1000, keys=1001))
    names = [each.name for each in plan.program.steps]
    assert names[1:5] == ["element", "mask", "mask", "mask"]


def test_masks_that_always_hold_are_left_out() -> None:
    names = [each.name for each in planned(R2).program.steps]
    assert "mask" not in names and "element" not in names


@pytest.mark.parametrize(
    ("case", "stages", "slots", "paired", "ctas"),
    [(R1, 2, 2, True, 132), (R2, 4, 2, False, 132), (Attention(causal=True), 4, 2, False, 4)],
)
def test_shared_memory_and_order(
    case: Attention, stages: int, slots: int, paired: bool, ctas: int
) -> None:
    plan = planned(case)
    assert (plan.stages, plan.slots) == (stages, slots)
    assert (plan.order.paired, plan.order.ctas) == (paired, ctas)
    assert plan.arena.size <= device("nvidia-h100").max_shared_bytes


def test_a_turn_of_uneven_tiles_is_a_pair() -> None:
    order = planned(replace(R1, rows=2048 - 128)).order
    assert (order.tiles, order.turns_of_head, order.turns) == (15, 8, 8 * 256)


CUBINS = {
    "wide, causal": R1,
    "full": R2,
    "three warpgroups": replace(R2, tile=(192, 128)),
    "all at once": replace(R1, alibi=True, softcap=30.0, window=512, rows=2000, keys=2001),
}


@pytest.mark.parametrize("name", CUBINS)
def test_nothing_spills(name: str) -> None:
    cubin = compile_cubin(lower(attention(CUBINS[name])).image.cuda)
    for usage in cubin.resources:
        assert not usage.complaints, usage
        assert usage.registers in (128, 168)


def test_masks_are_tested_tile_by_tile() -> None:
    text = lower(attention(Attention(causal=True)), SMALL).image.cuda
    assert text.count("if (least") == 2  # the first tile of keys, and all others
