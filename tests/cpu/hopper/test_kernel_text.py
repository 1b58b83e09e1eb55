"""The generated CUDA of small products: instructions, roles and launches."""

from __future__ import annotations

import re

import pytest

from cpu.lower.support import kernels_in, steps
from crossfuse.lower.extract import Lowered, lower
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func

LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
MULTICAST = f"{LOAD}.multicast::cluster"
HINT = ".L2::cache_hint"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


def lowered(text: str, name: str = "main", **tiles: int) -> Lowered:
    func = prim_func(parse(f"gemm:{text}"))
    return lower(schedule_tiled_gemm(func, tiles=TensorTiles(**tiles)), name=name)


def image_of(text: str, **tiles: int) -> KernelImage:
    return lowered(text, **tiles).image


def body(image: KernelImage) -> str:
    """Text of the kernel alone, from its definition."""
    return kernels_in(image.cuda)


def products(image: KernelImage) -> list[tuple[str, str]]:
    """Shape and types of each wgmma in the helpers, and what follows its scale predicate."""
    pattern = r"wgmma\.mma_async\.sync\.aligned\.(\S+) .*?, ps0, (.*?); }"
    return re.findall(pattern, image.cuda)


def lines_with(text: str, mark: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if mark in line]


@pytest.mark.parametrize(
    ("rows", "threads"), [(64, 256), (128, 384), (192, 512)], ids=["one", "two", "three"]
)
def test_launch(rows: int, threads: int) -> None:
    image = image_of("M=384,N=128,K=64,dtype=float16,weights=nk", rows=rows, cluster=2)
    (launch,) = image.launches
    assert f"__launch_bounds__({threads}, 1) main_kernel(" in image.cuda
    assert launch.symbol == "main_kernel"
    assert launch.block == (threads, 1, 1)
    assert launch.cluster == (2, 1, 1)
    assert launch.grid == (-(-384 // (2 * rows)) * 2, 1, 1)
    assert launch.arguments == ("A_map", "B_map", "out_map")
    assert tuple(each.name for each in launch.tensor_maps) == launch.arguments
    for name in launch.arguments:
        assert f"const __grid_constant__ CUtensorMap {name}" in image.cuda
    assert len(lines_with(image.cuda, "extern __shared__")) == 1


def test_names_and_shared_memory() -> None:
    result = lowered("M=64,N=64,K=64,dtype=float16", name="product", stages=2)
    (launch,) = result.image.launches
    assert result.image.name == "product"
    assert f"{launch.symbol}(" in result.image.cuda
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
    ("dtype", "weights", "columns", "shape", "flags"),
    [
        ("float16", "nk", 64, "m64n64k16.f32.f16.f16", "1, 1, 0, 0"),
        ("float16", "kn", 64, "m64n64k16.f32.f16.f16", "1, 1, 0, 1"),
        ("bfloat16", "nk", 256, "m64n256k16.f32.bf16.bf16", "1, 1, 0, 0"),
        ("bfloat16", "kn", 200, "m64n200k16.f32.bf16.bf16", "1, 1, 0, 1"),
        ("float16", "nk", 8, "m64n8k16.f32.f16.f16", "1, 1, 0, 0"),
        # Types of 8 bits are K-major alone: no flags of layouts.
        ("float8_e4m3fn", "nk", 64, "m64n64k32.f32.e4m3.e4m3", "1, 1"),
        ("float8_e5m2", "nk", 48, "m64n48k32.f32.e5m2.e5m2", "1, 1"),
    ],
)
def test_wgmma(dtype: str, weights: str, columns: int, shape: str, flags: str) -> None:
    text = f"M=64,N={columns},K=256,dtype={dtype},weights={weights},out=bfloat16"
    image = image_of(text)
    assert products(image) == [(shape, flags)]
    # Four instructions are 128 bytes of the reduction.
    calls = lines_with(body(image), "mma_async_sync_aligned")
    assert len(calls) == 4
    assert all(call.count("accumulators_ptr[") == columns // 2 for call in calls)
    # The first one of a tile clears what was there.
    assert [call.endswith("(uint)1);") for call in calls] == [False, True, True, True]


@pytest.mark.parametrize(
    ("text", "tiles", "shared"),
    [
        ("M=128,N=128,weights=nk", {"cluster": 1}, False),
        ("M=256,N=128,weights=nk", {"cluster": 2}, True),
        ("M=512,N=128,weights=nk", {"cluster": 4}, True),
        ("M=256,N=128,weights=kn", {"cluster": 2}, True),
        ("M=256,N=64,weights=kn", {"cluster": 2}, True),  # two boxes of 32 columns
        ("M=256,N=32,weights=kn", {"cluster": 2}, False),  # one for two CTAs
        ("M=256,N=8,weights=nk", {"cluster": 2}, False),
    ],
)
def test_multicast_of_what_is_shared(text: str, tiles: dict[str, int], shared: bool) -> None:
    image = image_of(f"{text},K=128,dtype=float16", **tiles)
    cluster = tiles["cluster"]
    assert bool(re.search(rf"{MULTICAST}(?:{HINT})? ", image.cuda)) == shared
    calls = lines_with(body(image), "cp_async_bulk_tensor_g2s")
    cast = [call for call in calls if "multicast__cluster" in call]
    right = [call for call in calls if "&(B_map)" in call]
    assert calls == right + [call for call in calls if "&(A_map)" in call]
    assert cast == (right if shared else [])
    everybody = rf"\(ushort\){2**cluster - 1}(?:, \(uint64_t\)\d+ULL)?\);$"
    assert all(re.search(everybody, call) for call in cast)
    # A stage that others fill too is handed back to all of them.
    assert ("mapa.shared::cluster" in image.cuda) == shared
    assert ("mbarrier.arrive.shared::cluster" in image.cuda) == shared
    assert ("barrier.cluster.arrive.release.aligned" in image.cuda) == (cluster > 1)


def test_each_ring_expects_the_boxes_of_its_operand() -> None:
    image = image_of("M=128,N=200,K=64,dtype=float16,weights=kn")
    text = body(image)
    calls = lines_with(text, "cp_async_bulk_tensor_g2s")
    assert [re.findall(r"&\((\w+_map)\)", call)[0] for call in calls] == ["B_map"] * 4 + ["A_map"]
    right, left = lines_with(text, "expect_tx_arrive")
    assert right.endswith(f"(uint){4 * 64 * 128});")
    assert left.endswith(f"(uint){128 * 128});")


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
    assert (f"{STORE} " in image.cuda) == tma
    assert ("stmatrix.sync.aligned" in image.cuda) == tma
    assert ("fence.proxy.async.shared::cta" in image.cuda) == tma
    assert ("out_ptr[" in image.cuda) != tma
    assert image.launches[0].arguments[2] == ("out_map" if tma else "out")


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (8, ["x2", "s2g"]),
        (16, ["x4", "s2g"]),
        (24, ["x4", "x2", "s2g", "s2g"]),
        (72, ["x4"] * 4 + ["x2", "s2g", "s2g"]),
        # Three boxes go round two slots.
        (88, [*["x4"] * 4, "s2g", "x4", "s2g", "x2", "s2g"]),
    ],
)
def test_the_last_eight_columns_are_two_matrices(columns: int, wanted: list[str]) -> None:
    text = f"M=64,N={columns},K=64,dtype=bfloat16,weights=nk"
    kernel = body(image_of(text, columns=columns))
    found = steps(kernel, "m8n8_x4", "m8n8_x2", "s2g")
    assert [each.removeprefix("m8n8_") for each in found] == wanted


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("M=128,N=64,K=64", False),
        ("M=256,N=128,K=72", False),
        ("M=120,N=64,K=64", True),
        ("M=128,N=63,K=64", True),
        ("M=100,N=300,K=64", True),
    ],
)
def test_only_tails_are_guarded(text: str, guarded: bool) -> None:
    image = image_of(f"{text},dtype=float16,out=float32,weights=nk")
    lines = [line.strip() for line in body(image).splitlines()]
    stores = [
        index for index, line in enumerate(lines) if re.match(r"out_ptr\[|\w+_st\w+_v2_f32\(", line)
    ]
    assert stores
    # The warm-up stores nothing, be it within the output or not.
    warmup = "if (0 < crossfuse_hide(turn))"
    guards = [lines[index - 1] for index in stores]
    assert all(each.startswith("if (") and "0 < crossfuse_hide(turn)" in each for each in guards)
    assert any(each != f"{warmup} {{" for each in guards) == guarded


@pytest.mark.parametrize(
    ("rows", "loading", "multiplying"), [(64, None, None), (128, 40, 232), (192, 32, 160)]
)
def test_registers_move_to_who_multiplies(
    rows: int, loading: int | None, multiplying: int | None
) -> None:
    text = "M=384,N=128,K=64,dtype=bfloat16,weights=nk"
    cuda = image_of(text, rows=rows).cuda
    found = re.findall(r'"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (\d+);"', cuda)
    wanted = [] if loading is None else [("dec", str(loading)), ("inc", str(multiplying))]
    assert sorted(found) == wanted


def test_few_clusters_go_through_many_tiles() -> None:
    """Tiles of 256 x 256 for each cluster of two; the device has room for 66 clusters."""
    few = image_of("M=8448,N=512,K=64,dtype=bfloat16,weights=nk")
    assert few.launches[0].grid == (132, 1, 1)
    assert "while" not in body(few)
    many = image_of("M=8704,N=512,K=64,dtype=bfloat16,weights=nk")
    assert many.launches[0].grid == (132, 1, 1)
    # All three roles go through the same tiles: one loads right tiles, one left ones.
    assert body(many).count("while") == 3
    steps_on = r"(tile_ptr\w*)\[0\] = \(\1\[0\] \+ 66\);"
    assert len(set(re.findall(steps_on, body(many)))) == 3


@pytest.mark.parametrize(
    ("columns", "boxes"),
    [
        (128, ["stmatrix"] * 8 + ["s2g"] * 2),  # two boxes have room: they leave at once
        (192, (["stmatrix"] * 4 + ["s2g"]) * 3),
    ],
)
def test_order_of_the_roles(columns: int, boxes: list[str]) -> None:
    """Barriers are set up before anybody uses them, and outlive everybody who may."""
    text = body(image_of(f"M=256,N={columns},K=64,dtype=bfloat16,weights=nk", stages=1))
    meet = "barrier_cluster_wait"
    marks = ("init_init", "fence_mbarrier_init", meet, "g2s", "wgmma_fence", "stmatrix", "s2g")
    found = steps(text, *marks)
    stores = [each for each in found if each in ("stmatrix", "s2g")]
    assert stores == boxes
    # A full and an empty barrier of either ring.
    before = [*["init_init"] * 4, "fence_mbarrier_init", meet, "g2s", "g2s", "wgmma_fence"]
    assert found == [*before, *stores, meet]


def test_what_runs_once_is_warmed_up() -> None:
    """Its first turn multiplies nothing, and stores nothing."""
    text = body(image_of("M=128,N=64,K=64,dtype=bfloat16,weights=nk"))
    turns = "for (int turn = 0; turn < crossfuse_hide(2); ++turn)"
    skipped = r"if \(0 < crossfuse_hide\(turn\)\)"
    marks = (re.escape(turns), skipped, "mma_async_sync", "stmatrix", "s2g")
    (first, *found) = dict.fromkeys(steps(text, *marks))
    assert first == re.escape(turns)
    assert found == [skipped, "mma_async_sync", "stmatrix", "s2g"]
    assert steps(text, skipped, "mma_async_sync", "s2g") == [
        *(skipped, *["mma_async_sync"] * 4),
        *(skipped, "s2g"),
    ]
    many = body(image_of("M=8704,N=512,K=64,dtype=bfloat16,weights=nk"))
    assert "turn" not in many


def test_the_same_schedule_gives_the_same_text() -> None:
    text = "M=200,N=100,K=80,dtype=bfloat16,weights=nk,act=silu"
    assert image_of(text) == image_of(text)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "x*x + 1"])
def test_an_epilogue_is_computed_for_each_accumulator(act: str) -> None:
    plain = body(image_of("M=64,N=16,K=64,dtype=bfloat16,weights=nk"))
    text = body(image_of(f"M=64,N=16,K=64,dtype=bfloat16,weights=nk,act={act}"))
    assert len(text) > len(plain)
    for index in range(8):
        assert f"accumulators_ptr[{index}]" in text


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
