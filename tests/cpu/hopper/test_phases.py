"""Kernels of two phases: what is decided for them, and the text that is made of it."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from cpu.lower.support import kernels_in
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import KernelPlan, plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import BufferSpec, KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func

H100 = device("nvidia-h100")
FFN = "gated_ffn:M=64,K=128,N=256,L=128,dtype=bfloat16"
WIDE = "gated_ffn:M=64,K=256,N=1024,L=512,dtype=bfloat16"
LOAD = "tvm_builtin_ptx_cp_async_bulk_tensor_g2s"
#: Workload, tiles of both phases.
SHAPES: dict[str, tuple[str, TensorTiles, TensorTiles]] = {
    "chosen": (FFN, TensorTiles(), TensorTiles()),
    "narrow tiles": (FFN, TensorTiles(64, 8, 4), TensorTiles(64, 16, split=4)),
    "few wide tiles": (FFN, TensorTiles(64, 64, 2), TensorTiles(64, 64, split=2)),
    "side by side": (WIDE, TensorTiles(64, 16, 4, across=2), TensorTiles(64, 32, split=4)),
    "two rows of tiles": (
        "gated_ffn:M=256,K=128,N=512,L=256,dtype=bfloat16",
        TensorTiles(128, 64, 4, stacked=False),
        TensorTiles(128, 64, split=4),
    ),
    "one below the other": (
        "gated_ffn:M=256,K=128,N=512,L=256,dtype=bfloat16",
        TensorTiles(128, 64, 2, stacked=True),
        TensorTiles(128, 16, split=2),
    ),
    "two by two": (
        "gated_ffn:M=256,K=128,N=512,L=256,dtype=bfloat16",
        TensorTiles(128, 64, 2, across=2, stacked=True),
        TensorTiles(128, 16, split=2),
    ),
    "one below the other, not split": (
        "gemm_chain:M=200,K=64,N=512,L=136,dtype=float16,weights=kn",
        TensorTiles(stacked=True),
        TensorTiles(),
    ),
    "tails": (
        "gated_ffn:M=100,K=136,N=384,L=72,dtype=bfloat16",
        TensorTiles(cluster=2),
        TensorTiles(),
    ),
    "chain": (
        "gemm_chain:M=128,K=96,N=512,L=80,dtype=float16,act=gelu",
        TensorTiles(),
        TensorTiles(),
    ),
}


@cache
def scheduled(name: str, staged: bool = True, constant: bool = False) -> Any:
    text, first, second = SHAPES[name]
    return schedule_tiled_ffn(
        prim_func(parse(text)),
        first=first,
        second=second,
        staged=staged,
        constant_weights=constant,
    )


def plans(name: str, staged: bool = True, constant: bool = False) -> list[KernelPlan]:
    kernels = recover(only_function(scheduled(name, staged, constant)))
    return [plan_kernel(each, H100, number) for number, each in enumerate(kernels)]


@cache
def image_of(name: str, staged: bool = True, constant: bool = False) -> KernelImage:
    return lower(scheduled(name, staged, constant)).image


def calls(image: KernelImage, mark: str) -> list[str]:
    """Statements of the kernels, not of the helpers, that call a helper."""
    return [line.strip() for line in kernels_in(image.cuda).splitlines() if mark in line]


@pytest.mark.parametrize("name", SHAPES)
def test_one_kernel_of_two_phases(name: str) -> None:
    (plan,) = plans(name)
    first, second = plan.phases
    assert plan.is_persistent
    assert first.program.staged and not second.program.staged
    assert (first.awaits, second.raises) == (None, None)
    assert second.awaits == first.raises is not None
    assert first.raises.buffer.same_as(second.program.contraction.left.buffer)
    assert first.program.exchange is None
    assert plan.cluster_size == first.program.cluster_size == second.program.cluster_size
    assert plan.consumers == first.consumers == second.consumers
    # Accumulators of one product after another: registers are those of the widest phase.
    widths = [len(each.rights) * each.columns // 2 for each in plan.phases]
    assert plan.accumulators == max(widths)


@pytest.mark.parametrize("name", SHAPES)
def test_a_flag_for_each_tile_of_the_intermediate(name: str) -> None:
    (plan,) = plans(name)
    first, _ = plan.phases
    flags, spec = first.raises, parse(SHAPES[name][0])
    assert flags is not None
    assert (flags.rows, flags.columns) == (64 * plan.consumers, first.columns)
    assert (flags.down, flags.across) == (-(-spec.M // flags.rows), -(-spec.N // flags.columns))
    assert flags.raisers == plan.consumers
    assert flags.count == plan.flag_count == flags.down * flags.across
    assert (plan.flags, plan.first_flag(flags)) == ((flags,), 0)
    # Tiles of the intermediate, and those beyond it that fill a cluster.
    made = first.program.tiles * plan.cluster_size
    assert flags.count <= made < flags.count + plan.cluster_size * flags.down


def test_flags_by_number() -> None:
    (plan,) = plans("two rows of tiles")
    flags = plan.phases[0].raises
    assert flags is not None
    assert (flags.down, flags.across, flags.raisers, flags.count) == (2, 8, 2, 16)
    (plan,) = plans("narrow tiles")
    flags = plan.phases[0].raises
    assert flags is not None
    assert (flags.down, flags.across, flags.raisers, flags.count) == (1, 32, 1, 32)


@pytest.mark.parametrize("name", SHAPES)
def test_state_is_kept_and_the_intermediate_is_a_workspace(name: str) -> None:
    (plan,) = plans(name)
    image = image_of(name)
    ctas = plan.clusters * plan.cluster_size
    state = BufferSpec("crossfuse_flags_0", (plan.flag_count + ctas,), "uint32", True)
    assert image.state == plan.state == (state,)
    spec = parse(SHAPES[name][0])
    assert image.workspaces == (BufferSpec("hidden", (spec.M, spec.N), spec.dtype, True),)
    (launch,) = image.launches
    assert "crossfuse_flags_0" in launch.arguments
    assert launch.grid == (ctas, 1, 1)


def test_flags_are_named_by_their_kernel() -> None:
    (programs,) = recover(only_function(scheduled("chosen")))
    (state,) = plan_kernel(programs, H100, 3).state
    assert state.name == "crossfuse_flags_3"


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", ["chosen", "side by side"])
def test_only_constant_weights_let_it_start_early(name: str, constant: bool) -> None:
    (plan,) = plans(name, constant=constant)
    assert plan.early == constant
    image = image_of(name, constant=constant)
    (launch,) = image.launches
    assert launch.cooperative
    assert launch.early == constant
    # Left tiles alone wait for the kernel before.
    assert ("griddepcontrol.wait" in image.cuda) == constant
    assert "griddepcontrol.launch_dependents" in image.cuda


def test_kernels_apart_have_no_flags() -> None:
    first, second = plans("chosen", staged=False)
    for plan in (first, second):
        assert not plan.is_persistent
        assert (plan.flags, plan.flag_count, plan.state) == ((), 0, ())
        assert len(plan.phases) == 1
    # The second one's weights are no intermediate: they are loaded before the first is over.
    assert (first.early, second.early) == (False, True)
    constant = plans("chosen", staged=False, constant=True)
    assert [each.early for each in constant] == [True, True]
    image = image_of("chosen", staged=False)
    assert not any(each.cooperative for each in image.launches)
    assert image.state == ()
    assert "ld.acquire.gpu" not in image.cuda
    assert "red.release.gpu" not in image.cuda


#: What is chosen need not be split.
SPLIT = [each for each in SHAPES if "not split" not in each and each != "chosen"]


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_received_lies_where_right_tiles_were(name: str) -> None:
    (plan,) = plans(name)
    _, second = plan.phases
    arena = plan.arena
    assert arena.size <= H100.max_shared_bytes
    received, right = arena["received"], arena["right"]
    assert received.offset == right.offset
    assert received.size == second.program.exchange.place.extent * second.slice_bytes
    assert right.size == max(plan.right.size, received.size)
    assert arena["left"].size == plan.left.size
    assert arena["exchange_barriers"].size == 16
    assert arena["barriers"].size == 16 * (plan.left.stages + plan.right.stages)
    # All others lie beside one another.
    others = sorted(
        (each for each in arena.regions if each.name != "received"), key=lambda each: each.offset
    )
    for region, following in pairwise(others):
        assert region.end <= following.offset
    for each in others:
        assert each.offset % (8 if "barriers" in each.name else 1024) == 0


@pytest.mark.parametrize("name", SHAPES)
def test_a_stage_holds_what_the_widest_phase_loads(name: str) -> None:
    (plan,) = plans(name)
    assert plan.left.pitch == max(each.left.size for each in plan.phases)
    rights = [sum(each.size for each in phase.rights) for phase in plan.phases]
    assert plan.right.pitch == max(rights)
    for ring in (plan.left, plan.right):
        assert 2 <= ring.stages <= 12


def test_a_ring_has_the_sharers_of_the_phase_where_most_are() -> None:
    """Two tiles of four CTAs each: all share A, two share each part of the intermediate."""
    (plan,) = plans("side by side")
    first, second = plan.phases
    assert plan.cluster_size == 8
    assert (first.left.sharers, second.left.sharers) == (8, 2)
    assert [each.tag for each in first.left.shared_by] == ["cluster.y", "cluster.x"]
    assert [each.tag for each in second.left.shared_by] == ["cluster.y"]
    assert plan.left.sharers == 8
    assert plan.right.sharers == 1
    # Where fewer share, each arrival counts for several: 8 of them empty a stage in either phase.
    text = calls(image_of("side by side"), "mbarrier_arrive")
    weights = {
        int(found)
        for line in text
        if "cluster" in line
        for found in re.findall(r"\(uint\)(\d+)\);$", line)
    }
    assert 4 in weights


def test_two_descriptors_of_one_tensor_have_two_names() -> None:
    (plan,) = plans("side by side")
    first, second = plan.phases
    (stored,) = first.store.maps
    assert (stored.name, second.left.map.name) == ("hidden_map", "hidden_map1")
    assert stored.buffer == second.left.map.buffer == "hidden"
    assert stored.box != second.left.map.box
    names = [each.name for each in plan.tensor_maps]
    assert names == ["A_map", "B_gate_map", "B_up_map", "hidden_map", "hidden_map1", "D_map"]
    (launch,) = image_of("side by side").launches
    assert launch.tensor_maps == plan.tensor_maps
    assert [each for each in launch.arguments if each.endswith(("_map", "_map1"))] == sorted(names)


def test_one_descriptor_of_equal_copies() -> None:
    """Boxes of 64 rows and 64 columns leave and come back by one map."""
    (plan,) = plans("few wide tiles")
    first, second = plan.phases
    assert first.store.maps == (second.left.map,)
    assert [each.name for each in plan.tensor_maps].count("hidden_map") == 1


@pytest.mark.parametrize("name", ["chosen", "side by side"])
def test_flags_are_raised_and_awaited(name: str) -> None:
    image = image_of(name)
    for mark in ("ld.acquire.gpu.global.u32", "red.release.gpu.global.add.u32"):
        assert mark in image.cuda
    assert len(calls(image, "crossfuse_raise_flag")) == 1
    assert len(calls(image, "crossfuse_await_flags")) == 1
    for helper, before in (("raise_flag", "red.release"), ("await_flags", None)):
        start = image.cuda.index(f"crossfuse_{helper}(")
        text = image.cuda[start : image.cuda.index("\n}", start)]
        fence = text.index("fence.proxy.async")
        # Bulk copies on either side of a flag are of another proxy than the flag.
        assert fence < text.index(before) if before else fence > text.index("ld.acquire")
    # The flag is raised once the stores are complete, not only read from shared memory.
    kernel = kernels_in(image.cuda)
    raised = kernel.index("crossfuse_raise_flag")
    waits = "bar_sync" if name == "chosen" else "bulk_wait_group_async_bulk_wait_group_0("
    assert waits in kernel[:raised]


def streamed(plan: KernelPlan) -> set[str]:
    """Descriptors of tiles that one cluster alone loads."""
    operands = [operand for phase in plan.phases for operand in phase.operands]
    return {each.map.name for each in operands if each.streamed}


@pytest.mark.parametrize("name", SHAPES)
def test_only_streamed_operands_are_hinted(name: str) -> None:
    (plan,) = plans(name)
    image = image_of(name)
    hinted: dict[str, bool] = {}
    for call in calls(image, LOAD):
        (map_,) = re.findall(r"&\((\w+_map\d?)\)", call)
        assert hinted.setdefault(map_, "L2__cache_hint" in call) == ("L2__cache_hint" in call)
    assert {each for each, has in hinted.items() if has} == streamed(plan)
    for phase in plan.phases:
        for operand in phase.operands:
            assert operand.map.fetch == (256 if operand.streamed and operand.k_major else 128)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("chosen", {"B_gate_map", "B_up_map", "D_map"}),
        ("side by side", {"B_gate_map", "B_up_map", "D_map"}),
        # Both rows of tiles load the weights.
        ("two rows of tiles", set()),
        # A cluster has both rows; where it splits the second reduction, it has one of them.
        ("one below the other", {"B_gate_map", "B_up_map"}),
    ],
)
def test_what_is_streamed(name: str, wanted: set[str]) -> None:
    (plan,) = plans(name)
    assert streamed(plan) == wanted
