"""Partial tiles that TMA adds, by both checkers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.hopper.accumulation import CASES, right, scheduled, spec_of
from cpu.hopper.checkers import emulated, mixed_inputs, passed
from cpu.lower.support import kernels_in
from crossfuse import _tvm as ir
from crossfuse.compiler.options import placed_options
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.markers import ACCUMULATE, staged_blocks
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.rules.parted_tiles import ClusterTiles, RegisterTiles
from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
from crossfuse.workload import adversarial_inputs, parse, prim_func, random_inputs, resolve

ADD = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    """The second order is a second launch on the same sums."""
    image = passed(spec_of(name), scheduled(name))
    assert image.unordered
    assert ADD in image.cuda


@pytest.mark.parametrize("name", ["3 parts, gated", "registers", "two warpgroups"])
def test_adversarial_inputs(name: str) -> None:
    without = () if spec_of(name).dtype == "float16" else ("denormal",)
    for inputs in mixed_inputs(spec_of(name), without):
        emulated(spec_of(name), right(name), inputs, orders=2)


@pytest.mark.slow
def test_sums_below_normal_numbers_are_zero() -> None:
    """Additions of float32 in L2 flush them: what float32 itself, and so bfloat16, could hold."""
    spec = spec_of("registers")
    inputs = dict(adversarial_inputs(spec))["denormal"]
    report = emulate(right("registers"), inputs)
    report.raise_if_wrong()
    due = emulate(right("registers", unordered=False), inputs).outputs["out"].astype(np.float64)
    found = report.outputs["out"].astype(np.float64)
    flushed = np.abs(due) < 2.0**-126
    assert not found[flushed].any()
    assert due[flushed].any()
    assert np.abs(found - due).max() <= 2 * 2.0**-126


def twice(image: KernelImage) -> KernelImage:
    """Two launches one after another, on the same memory."""
    return replace(image, launches=image.launches * 2)


@pytest.mark.parametrize("name", ["2 parts", "registers, gated"])
def test_a_launch_that_starts_early_finds_zeros(name: str) -> None:
    image = right(name, constant=True)
    assert image.launches[0].early
    emulated(spec_of(name), twice(image), random_inputs(spec_of(name)))


@pytest.mark.slow
def test_two_parts_have_one_sum() -> None:
    """Zero plus a plus b is zero plus b plus a: all bits are those of the sum in order."""
    spec = spec_of("2 parts")
    inputs = random_inputs(spec)
    report = emulate(right("2 parts"), inputs, orders=4)
    report.raise_if_wrong()
    due = emulate(right("2 parts", unordered=False), inputs, orders=1).outputs["out"]
    for outputs in (report.outputs, *report.later):
        assert outputs["out"].tobytes() == due.tobytes()


@pytest.mark.slow
def test_three_parts_have_several() -> None:
    inputs = random_inputs(spec_of("float32 output"))
    report = emulate(right("float32 output"), inputs, orders=4)
    report.raise_if_wrong()
    found = [each["out"] for each in (report.outputs, *report.later)]
    assert len({each.tobytes() for each in found}) > 1
    assert np.allclose(found[0], found[-1], rtol=1e-5, atol=1e-4)


def test_sums_are_kept_between_launches_and_parts_are_not_stored() -> None:
    image = right("boxes of 32 and 8")
    flags, sums = image.state
    assert (sums.shape, sums.dtype) == ((36, 80), "float32")
    assert image.workspaces == ()
    # One flag for each tile of the output, then the launches that each CTA has seen.
    assert flags.shape == (2 + 6,)
    boxes = {each.box: each.swizzle for each in image.launches[0].tensor_maps[-2:]}
    assert boxes == {(32, 64): 128, (8, 64): 32}


def test_without_the_mark_nothing_changes() -> None:
    image = right("boxes of 32 and 8", unordered=False)
    assert not image.unordered
    assert ADD not in image.cuda
    assert [each.shape for each in image.workspaces] == [(3, 36, 80)]


def test_the_flag_is_raised_behind_the_additions() -> None:
    text = kernels_in(right("2 parts").cuda)
    behind = text[text.index("cp_reduce_async_bulk") :]
    steps = re.findall(r"commit_group\(|wait_group_(?:read_)?0\(|crossfuse_raise_flag\(", behind)
    assert steps[:3] == ["commit_group(", "wait_group_0(", "crossfuse_raise_flag("]
    assert (
        "fence.proxy.async.global"
        in right("2 parts").cuda[right("2 parts").cuda.index("void crossfuse_raise_flag") :][:200]
    )


def test_one_flag_counts_all_parts() -> None:
    """Four warpgroups of two parts, and one lane that waits."""
    text = kernels_in(right("two warpgroups").cuda)
    (await_parts,) = re.findall(r"crossfuse_await_parts\((.*)\);", text)
    assert await_parts.endswith("1, ((launches_before + (uint)1) * (uint)4)")


def test_the_schedule_says_it() -> None:
    sch = scheduled("2 parts")
    found: list[Any] = []
    ir.walk(sch.mod["main"].body, (ir.SBlock, lambda each: found.append(each.annotations)))
    assert [str(each[ACCUMULATE]) for each in found if ACCUMULATE in each] == ["tma"]


@pytest.mark.slow
def test_slices_in_ring_order_by_bulk_copies() -> None:
    spec = parse("gemm_chain:M=16,K=64,N=384,L=96,dtype=bfloat16")
    tiles = ClusterTiles(64, 2, 3)
    passed(
        spec,
        schedule_clustered_ffn(prim_func(spec), tiles=tiles, unordered=True),
    )


def test_a_placement_takes_the_parts_of_the_rule() -> None:
    """Six, the fastest by the estimate."""
    func = prim_func(resolve("G10"))
    (option,) = placed_options(func, ("dsm-unordered",), device("nvidia-h100"), constant=True)
    image = lower(option.make()).image
    assert image.unordered
    assert image.launches[0].grid == (2 * 6 * 4, 1, 1)


REFUSED = {
    "one part": (
        lambda func: schedule_clustered_ffn(func, tiles=ClusterTiles(64, 2, 1), unordered=True),
        "found 1 part of the reduction",
    ),
    "one part in registers": (
        lambda func: schedule_register_ffn(func, tiles=RegisterTiles(64, 64, 1, 1), unordered=True),
        "found 1 part of the reduction",
    ),
    "one part, since more would have no columns": (
        lambda func: schedule_clustered_ffn(func, tiles=ClusterTiles(cluster=16), unordered=True),
        "found 1 part of the reduction",
    ),
    "a cluster that sums": (
        lambda func: schedule_register_ffn(func, tiles=RegisterTiles(64, 64, 2, 2), unordered=True),
        "found 2 parts of the reduction, which 2 CTAs of a cluster sum",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rules_refuse_what_l2_does_not_add(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ScheduleRefused) as caught:
        make(prim_func(parse("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16")))
    assert text in str(caught.value)
    assert "limit: at least 2 parts that are summed through L2" in str(caught.value)


def marked(block: str | None, value: str) -> Any:
    tiles = ClusterTiles(64, 2, 2)
    func = prim_func(parse("gemm_chain:M=64,K=64,N=256,L=64,dtype=bfloat16"))
    sch = schedule_clustered_ffn(func, tiles=tiles)
    sch.annotate(sch.get_sblock(block or staged_name(sch)), ACCUMULATE, value)
    return sch


def staged_name(sch: Any) -> str:
    (block,) = staged_blocks(sch.mod["main"])
    return str(block.name_hint)


def test_another_way_to_add_is_refused() -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(marked(None, "atomics"))
    assert "partial tiles added by 'atomics'" in str(caught.value)
    assert "crossfuse.accumulate of tma, or none: in the order of the parts" in str(caught.value)


def test_a_mark_on_another_block_is_refused() -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(marked("out", "tma"))
    assert "crossfuse.accumulate of a block inside a nest" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tiles"),
    [("G4", (64, 8, 6)), ("G7", (64, 8, 6)), ("G10", (64, 8, 6)), ("S8", (128, 8, 8))],
)
def test_nvcc_neither_spills_nor_serialises(name: str, tiles: tuple[int, ...]) -> None:
    func = prim_func(resolve(f"{name}:M=128"))
    sch = schedule_clustered_ffn(func, tiles=ClusterTiles(*tiles), unordered=True)
    (usage,) = compile_cubin(lower(sch).image.cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.stack_bytes) == (0, 0, 0)
    assert usage.advisories == ()
