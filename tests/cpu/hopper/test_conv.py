"""Chains of convolutions of pipelined kernels, by both checkers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import crossfuse
from cpu.hopper.checkers import emulated, mixed_inputs, passed
from crossfuse.emulate.cuda import change_argument, emulate
from crossfuse.errors import CheckFailed, LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage, PixelBox, TensorMap
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, schedule_clustered_ffn
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import (
    WorkloadSpec,
    check,
    lookup,
    parse,
    prim_func,
    random_inputs,
)

#: Workload, and what `ClusterTiles` takes.
CASES = {
    "odd images": ("batch=2,H=5,W=7,IC=64,OC1=64,OC2=64,k1=3", (64, 2, 1)),
    "one column, 5 x 5": ("batch=3,H=9,W=1,IC=128,OC1=64,OC2=64,k1=5", (64, 4, 1)),
    "one pixel": ("batch=1,H=1,W=1,IC=64,OC1=64,OC2=64,k1=3", (64, 1, 1)),
    "many rows, [k, n]": ("batch=1,H=20,W=10,IC=64,OC1=64,OC2=96,k1=3,weights=kn", (64, 2, 1)),
    "windows of one pixel": ("batch=2,H=7,W=7,IC=72,OC1=64,OC2=64,k1=1", (64, 2, 1)),
    "parts": ("batch=1,H=7,W=7,IC=64,OC1=256,OC2=64,k1=3,dtype=float16,act=gelu", (64, 2, 2)),
    "epilogues": (
        "batch=2,H=5,W=7,IC=64,OC1=64,OC2=64,k1=3,bias=first+last,scale=first,residual=in",
        (64, 2, 1),
    ),
    "two warpgroups": ("batch=5,H=5,W=5,IC=64,OC1=128,OC2=64,k1=3", (128, 4, 1)),
}
PIXELS = r"tvm_builtin_ptx_cp_async_bulk_tensor_g2s\w+im2col\w+bytes(?:_multicast__cluster)?"
RULES = ("dsm", "l2", "global")


def spec_of(name: str) -> WorkloadSpec:
    return parse(f"conv_chain:{CASES[name][0]}")


def scheduled(name: str, rule: str) -> Any:
    func = prim_func(spec_of(name))
    if rule == "dsm":
        return schedule_clustered_ffn(func, tiles=ClusterTiles(*CASES[name][1]))
    return schedule_tiled_ffn(func, staged=rule == "l2")


@cache
def right() -> KernelImage:
    """A cluster of two CTAs, which share the windows: each loads half of the pixels for both."""
    return lower(scheduled("odd images", "dsm")).image


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str, rule: str) -> None:
    image = passed(spec_of(name), scheduled(name, rule))
    assert ("im2col" in image.cuda) == (name != "windows of one pixel")


@pytest.mark.slow
def test_8_bit_floats() -> None:
    text = "conv_chain:batch=1,H=5,W=6,IC=128,OC1=128,OC2=64,k1=3,dtype=float8_e4m3fn,out=bfloat16"
    image = lower(schedule_tiled_ffn(prim_func(parse(text)))).image
    emulated(parse(text), image, random_inputs(parse(text)))  # LLVM rounds zeros wrongly


@pytest.mark.slow
def test_windows_shared_by_multicast_in_both_phases() -> None:
    text = "conv_chain:batch=1,H=8,W=8,IC=64,OC1=128,OC2=64,k1=3"
    tiles = TensorTiles(cluster=2, columns=32)
    image = passed(parse(text), schedule_tiled_ffn(prim_func(parse(text)), first=tiles))
    assert "im2col.mbarrier::complete_tx::bytes.multicast::cluster" in image.cuda


@pytest.mark.slow
def test_a_deep_reduction_is_split_where_a_kernel_ends_with_it() -> None:
    spec = parse("conv_chain:batch=2,H=5,W=7,IC=128,OC1=128,OC2=64,k1=3")
    tiles = TensorTiles(128, 16, split=2)
    schedule = schedule_tiled_ffn(prim_func(spec), first=tiles, second=tiles, staged=False)
    image = passed(spec, schedule)
    first, second = image.launches
    assert first.cluster == second.cluster == (2, 1, 1)
    # Each CTA loads the windows of its part, so that nobody shares them.
    assert "im2col.mbarrier::complete_tx::bytes [" in image.cuda
    (launch,) = lower(schedule_tiled_ffn(prim_func(spec))).image.launches
    assert launch.cooperative


@pytest.mark.slow
def test_rows_of_many_pixels_are_one_persistent_kernel() -> None:
    """Tiles are as wide as leaves a CTA for each, whatever the number of rows."""
    for name in ("C1", "C2", "C3", "C5", "C6", "C7"):
        (launch,) = lower(schedule_tiled_ffn(prim_func(lookup(name)))).image.launches
        assert launch.cooperative


@pytest.mark.parametrize("rule", ["dsm", "l2"])
def test_adversarial_inputs(rule: str) -> None:
    image = lower(scheduled("odd images", rule)).image
    for inputs in mixed_inputs(spec_of("odd images")):
        emulated(spec_of("odd images"), image, inputs, orders=1)


def test_the_map_is_that_of_the_images() -> None:
    (launch,) = right().launches
    (found,) = [each for each in launch.tensor_maps if each.buffer == "X"]
    assert found == TensorMap(
        "X_map",
        "X",
        (64, 7, 5, 2),
        (128, 7 * 128, 35 * 128),
        (64, 32),
        128,
        pixels=PixelBox((-1, -1), (-1, -1)),
    )


def test_windows_of_one_pixel_are_a_matrix() -> None:
    image = lower(scheduled("windows of one pixel", "dsm")).image
    (launch,) = image.launches
    (found,) = [each for each in launch.tensor_maps if each.buffer == "X"]
    assert found == TensorMap("X_map", "X", (72, 98), (144,), (64, 32), 128, 256)


FAULTS = {
    "the neighbour of the pixel": (7, "{} ^ 1", ""),
    "another row of the window": (8, "{} / 2", ""),
    "other channels": (2, "{} + 8", ""),
    "the pixel that follows": (3, "({} == 5 ? 4 : {} + 1)", ""),
    "another image": (5, "{} | 1", ""),
    "a pixel before the box": (3, "{} - 1", "tensor-map"),
    "a pixel behind the box": (4, "{} + 5", "tensor-map"),
    "an offset that the instruction has no bits for": (7, "{} + 256", "tensor-map"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str) -> None:
    position, by, kind = FAULTS[name]
    text = by.replace("{}", "{0}")
    image = change_argument(right(), PIXELS, position, text)
    inputs = random_inputs(spec_of("odd images"))
    report = emulate(image, inputs, orders=1)
    if kind:
        assert kind in {each.kind for each in report.findings}
        return
    report.raise_if_wrong()
    with pytest.raises(CheckFailed):
        check(spec_of("odd images"), inputs, report.outputs["out"])


def test_channels_that_do_not_fill_a_step_are_refused() -> None:
    text = "conv_chain:batch=1,H=8,W=8,IC=32,OC1=64,OC2=64,k1=3"
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule_tiled_ffn(prim_func(parse(text))))
    assert str(caught.value) == (
        "tile-operand: tensor 'X': found windows of 3 x 3 pixels of 32 channels; limit: a multiple "
        "of 64 channels (128 bytes), so that a step of the reduction lies within a pixel. Instead: "
        "pad the channels, or leave the stages out for the general lowering."
    )


def test_sums_of_two_products_are_not_split() -> None:
    func = prim_func(parse("gated_ffn:M=64,K=256,N=128,L=64"))
    with pytest.raises(ScheduleRefused) as caught:
        tiles = TensorTiles(64, 64, split=2)
        schedule_tiled_ffn(func, first=tiles, second=tiles, staged=False)
    assert str(caught.value) == (
        "tiles: block 'gemm0_gate': found reductions of 2 products split over 2 CTAs; limit: one "
        "product, of which they exchange the sums. Instead: leave out the split of the first "
        "products."
    )


@pytest.mark.slow
def test_compile_takes_every_placement(tmp_path: Any) -> None:
    spec = spec_of("odd images")
    for placement in RULES:
        compiled = crossfuse.compile(spec, placement=placement, directory=tmp_path)
        assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
        resources = compiled.artefact.manifest.resources
        assert all("no spills" in each.summary for each in resources)
        maps = [
            each for launch in compiled.artefact.manifest.launches for each in launch.tensor_maps
        ]
        assert PixelBox((-1, -1), (-1, -1)) in [each.pixels for each in maps]


@pytest.mark.slow
def test_threads_take_any_channels() -> None:
    spec = parse("conv_chain:batch=2,H=3,W=5,IC=5,OC1=8,OC2=4,k1=5,dtype=float32")
    for cluster in (1, 4):
        compiled = crossfuse.compile(spec, rule="threads", cluster=cluster)
        assert "failed" not in [each.status for each in crossfuse.check(compiled, gpu=False)]
