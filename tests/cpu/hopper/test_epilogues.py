"""Scales, biases and residuals in every place where elements are made, by both checkers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from cpu.hopper.checkers import emulated, mixed_inputs, passed
from cpu.lower.support import kernels_in
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.epilogue.elements import further_of
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import BufferSpec, KernelImage, TensorMap
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, schedule_clustered_ffn
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs

ONE = "scale=last,bias=last,residual=out"
BOTH = "scale=first+last,bias=first+last,residual=out"
#: One product: workload, tiles.
PRODUCTS = {
    "boxes": ("M=128,N=128,K=64,dtype=bfloat16,weights=nk,act=relu", {"rows": 128}),
    "boxes of 8": ("M=70,N=72,K=72,dtype=float16,weights=nk", {"columns": 72}),
    "three warpgroups": ("M=190,N=96,K=64,dtype=bfloat16,weights=nk", {"rows": 192, "cluster": 1}),
    "pairs": ("M=70,N=74,K=72,dtype=bfloat16,weights=nk,act=gelu", {"columns": 80}),
    "an odd width": ("M=67,N=37,K=72,dtype=float16,weights=nk", {}),
    "one row": ("M=1,N=64,K=64,dtype=bfloat16,weights=kn", {}),
    "one row, odd width": ("M=1,N=33,K=72,dtype=bfloat16,weights=nk,out=float32", {}),
    "float32": ("M=100,N=64,K=64,dtype=bfloat16,weights=nk,out=float32", {}),
    "float32, odd width": ("M=66,N=39,K=72,dtype=float16,weights=nk,out=float32", {}),
    "e4m3 to bfloat16": ("M=65,N=80,K=128,dtype=e4m3,weights=nk,out=bfloat16", {}),
    "e5m2 to float16, odd width": ("M=64,N=45,K=128,dtype=e5m2,weights=nk,out=float16", {}),
    "e4m3 to float32": ("M=64,N=40,K=128,dtype=e4m3,weights=nk,out=float32", {}),
    "split, whole warps": (
        "M=64,N=64,K=256,dtype=bfloat16,weights=nk",
        {"split": 2, "columns": 64},
    ),
    "split, tails": ("M=100,N=88,K=256,dtype=float16,weights=nk", {"split": 2}),
    "split, one row": ("M=1,N=128,K=256,dtype=bfloat16,weights=nk", {"split": 4}),
    "split, float32": ("M=16,N=64,K=256,dtype=bfloat16,weights=nk,out=float32", {"split": 2}),
    "split, several turns": (
        "M=128,N=256,K=256,dtype=bfloat16,weights=nk",
        {"split": 2, "columns": 256, "rows": 128},
    ),
}
#: Two products.
CHAINS = {
    "gated": "gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16",
    "gated, tails": "gated_ffn:M=100,K=72,N=256,L=80,dtype=float16",
    "one row": "gated_ffn:M=1,K=64,N=256,L=64,dtype=bfloat16,weights=kn",
    "chain to float32": "gemm_chain:M=33,K=72,N=256,L=80,dtype=bfloat16,out=float32,act=gelu",
}
PLACES = {
    "two kernels": partial(schedule_tiled_ffn, staged=False, constant_weights=True),
    "one kernel": partial(schedule_tiled_ffn, staged=True, constant_weights=True),
    "cluster": partial(schedule_clustered_ffn, tiles=ClusterTiles(64, 2, 1), constant_weights=True),
    "parts": partial(schedule_clustered_ffn, tiles=ClusterTiles(64, 2, 2), constant_weights=True),
}
WAIT = "tvm_builtin_ptx_griddepcontrol_wait"


def product(name: str, further: str = ONE, **options: Any) -> Any:
    text, tiles = PRODUCTS[name]
    spec = parse(f"gemm:{text},{further}".rstrip(","))
    return spec, schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(**tiles), **options)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    passed(*product(name))


@pytest.mark.parametrize("further", ["bias=last", "scale=last", "residual=in"])
@pytest.mark.parametrize("name", ["boxes of 8", "e4m3 to float32", "split, tails"])
def test_each_alone(name: str, further: str) -> None:
    passed(*product(name, further))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, place: str) -> None:
    spec = parse(f"{CHAINS[name]},{BOTH}")
    passed(spec, PLACES[place](prim_func(spec)))


@pytest.mark.parametrize("place", PLACES)
def test_adversarial_inputs(place: str) -> None:
    spec = parse(f"gated_ffn:M=33,K=64,N=256,L=64,dtype=float16,{BOTH}")
    image = lower(PLACES[place](prim_func(spec))).image
    for inputs in mixed_inputs(spec):
        emulated(spec, image, inputs, orders=1)


@pytest.mark.slow
def test_several_tiles_for_each_cluster() -> None:
    spec = parse(f"gemm:M=512,N=192,K=64,dtype=bfloat16,weights=nk,{ONE}")
    schedule = schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(columns=64))
    image = lower(schedule, replace(device("nvidia-h100"), sms=4)).image
    assert image.launches[0].grid == (4, 1, 1)
    emulated(spec, image, random_inputs(spec))


@cache
def text_of(name: str, further: str = ONE) -> str:
    return kernels_in(lower(product(name, further)[1]).image.cuda)


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        # Rows of 64 columns a thread: a register for two columns, of either row for the residual.
        ("boxes", {"b32": 16 + 2 * 16, "f32": 1}),
        ("pairs", {"b32": 10 + 2 * 10, "f32": 1}),
        ("float32", {"b32": 8, "v2_f32": 2 * 8, "f32": 1}),
        ("an odd width", {"b16": 2 * 5 + 2 * 2 * 5, "f32": 1}),
        ("e4m3 to float32", {"b32": 5, "v2_f32": 2 * 5, "f32": 1}),
    ],
)
def test_two_neighbours_are_one_load(name: str, loads: dict[str, int]) -> None:
    found: dict[str, int] = {}
    for each in re.findall(r"tvm_builtin_ptx_ld_(?:vec_)?global_(\w+)\(", text_of(name)):
        found[each] = found.get(each, 0) + 1
    assert found == loads


@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_is_read_by_plain_loads(name: str) -> None:
    """The compiler takes those of constants in front of waits."""
    text = text_of(name)
    for operand in ("scale0", "bias0", "residual"):
        uses = text.count(f"{operand}_ptr[")
        assert uses
        assert uses == text.count(f"(&({operand}_ptr[")


def test_rows_come_before_the_product_and_matrices_a_box_ahead() -> None:
    text = text_of("boxes")
    multiplied = text.index("wgmma_commit")
    filled = text.index("stmatrix")
    loads = [each.start() for each in re.finditer("ld_global_b32", text)]
    assert sum(each < multiplied for each in loads) == 16 + 16
    assert sum(multiplied < each < filled for each in loads) == 16
    assert len(loads) == 16 + 2 * 16


def plans(schedule: Any) -> list[Any]:
    kernels = recover(only_function(schedule))
    return [plan_kernel(each, device("nvidia-h100")) for each in kernels]


def test_what_is_read_is_known_by_its_place() -> None:
    spec, schedule = product("boxes")
    (plan,) = plans(schedule)
    facts = {
        str(each.load.source.name): (each.dtype, each.by_row, each.by_column, each.paired)
        for each in further_of(plan.phases[0].program)
    }
    assert facts == {
        "scale0": ("float32", False, False, False),
        "bias0": (spec.dtype, False, True, True),
        "residual": (spec.dtype, True, True, True),
    }


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("further", ["", ONE])
def test_those_who_multiply_wait_if_they_read(further: str, constant: bool) -> None:
    schedule = product("boxes", further, constant_weights=constant)[1]
    (plan,) = plans(schedule)
    assert plan.early == constant
    assert plan.is_awaited_by_all == (constant and bool(further))
    text = kernels_in(lower(schedule).image.cuda)
    assert text.count(f"{WAIT}()") == constant * (1 + bool(further))
    if plan.is_awaited_by_all:
        # Not in the warm-up, which reads nothing either.
        waiting = text.rindex(f"{WAIT}()")
        assert "crossfuse_hide(turn)" in text[text.rindex("if (", 0, waiting) : waiting]
        assert waiting < text.index("ld_global")


def after_itself(image: KernelImage) -> KernelImage:
    """A kernel twice, the second time on the first one's output as its residual."""
    (launch,) = image.launches
    out = next(each for each in image.buffers if each.output)

    def renamed(map_: TensorMap) -> TensorMap:
        return replace(map_, buffer="made") if map_.buffer == "out" else map_

    first = replace(
        launch,
        arguments=tuple("made" if each == "out" else each for each in launch.arguments),
        tensor_maps=tuple(map(renamed, launch.tensor_maps)),
    )
    second = replace(
        launch,
        arguments=tuple("made" if each == "residual" else each for each in launch.arguments),
    )
    made = BufferSpec("made", out.shape, out.dtype, True)
    return replace(image, launches=(first, second), workspaces=(made,))


@cache
def early() -> tuple[Any, KernelImage]:
    spec, schedule = product("boxes", constant_weights=True)
    image = after_itself(lower(schedule).image)
    assert [each.early for each in image.launches] == [True, True]
    return spec, image


@pytest.mark.slow
def test_the_kernel_before_may_write_what_is_read() -> None:
    spec, image = early()
    inputs = random_inputs(spec)
    report = emulate(image, inputs, orders=3)
    assert report.findings == ()
    once = emulate(lower(product("boxes")[1]).image, inputs, orders=1).outputs["out"]
    check(spec, inputs | {"residual": once}, report.outputs["out"])


@pytest.mark.slow
def test_a_missing_wait_is_found() -> None:
    spec, image = early()
    report = emulate(drop_call(image, WAIT, 1), random_inputs(spec), orders=3)
    found = {each.kind: each for each in report.findings}
    assert "early-launch" in found, report.findings
    assert found["early-launch"].buffer == "made"
