"""Faults planted in a pipelined product, each with the finding that must name it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from cpu.hopper.instructions import ARRIVE, EXPECT, FENCE, LEAVE, MEET, WAIT
from cpu.hopper.planting import one_changed
from crossfuse.emulate.cuda import EmulationReport, change_argument, drop_call, emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs

SPEC = parse("gemm:M=512,N=192,K=256,dtype=bfloat16,weights=nk")
RELEASE = r"tvm_builtin_ptx_mbarrier_arrive_nocount\w+"
INIT = r"tvm_builtin_ptx_mbarrier_init\w+"
MULTICAST = r"tvm_builtin_ptx_cp_async_bulk_tensor_g2s\w+multicast\w+"
LOAD = r"tvm_builtin_ptx_cp_async_bulk_tensor_g2s\w+bytes(?:_L2__cache_hint)?"
PRODUCTS = r"tvm_builtin_ptx_wgmma_wait_group\w+_"
BOXES = r"tvm_builtin_ptx_cp_async_bulk_wait_group\w+"
COMMIT = r"tvm_builtin_ptx_wgmma_commit\w+"
WGMMA_FENCE = r"tvm_builtin_ptx_wgmma_fence\w+"
RELAXED = "cluster_arrive_relaxed_aligned()"
DESCRIPTOR = "ptx_wgmma_encode_matrix_descriptor"


@cache
def right() -> KernelImage:
    """Two tiles for one cluster of two CTAs, which share B; two stages for four steps."""
    tiles = TensorTiles(rows=128, columns=192, cluster=2, stages=2)
    small = replace(device("nvidia-h100"), sms=2)
    return lower(schedule_tiled_gemm(prim_func(SPEC), tiles=tiles), small).image


def no_barrier(index: int) -> KernelImage:
    """Without one of the barriers of the cluster."""
    return drop_call(drop_call(right(), ARRIVE, index), LEAVE, index)


FAULTS = {
    "consumer waits for the other phase": (
        lambda: change_argument(right(), WAIT, 1, "{} ^ 1", 1),
        "wrong result",
        "",
    ),
    "producer waits for the other phase": (
        lambda: change_argument(right(), WAIT, 1, "{} ^ 1", 0),
        "deadlock",
        "mbarrier at byte",
    ),
    "a stage is never handed back": (
        lambda: drop_call(drop_call(right(), RELEASE, 0), RELEASE, 0),
        "deadlock",
        "lacks 4 arrivals and 0 bytes",
    ),
    "too many bytes announced": (
        lambda: change_argument(right(), EXPECT, 1, "{} + 16"),
        "deadlock",
        "lacks 0 arrivals and 16 bytes",
    ),
    "too few bytes announced": (
        lambda: change_argument(right(), EXPECT, 1, "{} - 16"),
        "deadlock",
        "lacks 0 arrivals and -16 bytes",
    ),
    "a stage handed back before it is read": (
        lambda: drop_call(right(), PRODUCTS + "1"),
        "async-race",
        "a copy writes a tile that is still being multiplied",
    ),
    "registers read before the product is done": (
        lambda: drop_call(right(), PRODUCTS + "0"),
        "register-race",
        "a register is read before the product that adds to it is waited for",
    ),
    "products that belong to no group": (
        lambda: drop_call(right(), COMMIT),
        "async-race",
        "nothing tells of the end of the product",
    ),
    "no fence before the first product": (
        lambda: drop_call(right(), WGMMA_FENCE),
        "register-race",
        "no wgmma.fence follows the beginning of the thread",
    ),
    "a last barrier that releases nothing": (
        lambda: one_changed(right(), r"cluster_arrive_release_aligned\(\)", RELAXED, -1, body=True),
        "early-exit",
        "needs one after this access that this thread arrives at with release",
    ),
    "barriers that peers may not know": (
        lambda: drop_call(right(), r"tvm_builtin_ptx_fence_mbarrier_init\w+"),
        "mbarrier",
        "or a relaxed one without fence.mbarrier_init before it",
    ),
    "a copy that is in no group": (
        lambda: drop_call(right(), r"tvm_builtin_ptx_cp_async_bulk_commit\w+", -1),
        "early-exit",
        "before it knew that its copy has been read",
    ),
    "no fence before the copy of a box": (
        lambda: drop_call(right(), FENCE, 1),
        "async-race",
        "whose store no fence.proxy.async follows",
    ),
    "a box copied before all have stored": (
        lambda: drop_call(right(), MEET, 1),
        "async-race",
        "a copy by TMA reads bytes",
    ),
    "a box overwritten while it is copied": (
        lambda: drop_call(right(), BOXES, 2),
        "async-race",
        "a store overwrites what a copy still reads",
    ),
    "peers not waited for at the end": (
        lambda: no_barrier(-1),
        "early-exit",
        "",
    ),
    "peers not waited for at the start": (
        lambda: no_barrier(0),
        "mbarrier",
        "no barrier was initialised here",
    ),
    "a copy for one CTA only": (
        lambda: change_argument(right(), MULTICAST, 5, "(ushort)1"),
        "deadlock",
        "bytes",
    ),
    "a barrier that expects one more": (
        lambda: change_argument(right(), INIT, 1, "{} + 1", 1),
        "deadlock",
        "lacks 1 arrivals and 0 bytes",
    ),
    "a barrier that expects one less": (
        lambda: change_argument(right(), INIT, 1, "{} - 1", 1),
        "async-race",
        "",
    ),
    "a wrong coordinate": (
        lambda: change_argument(right(), LOAD, 3, "{} + 8"),
        "wrong result",
        "",
    ),
    "a copy to a wrong stage": (
        lambda: change_argument(right(), LOAD, 0, "{} + 16384"),
        "async-race",
        "",
    ),
    "a copy to an address that TMA cannot take": (
        lambda: change_argument(right(), LOAD, 0, "{} + 64"),
        "misaligned",
        "128 bytes",
    ),
    "a wrong stride in a descriptor": (
        lambda: change_argument(right(), DESCRIPTOR, 3, "32", 1),
        "wrong result",
        "",
    ),
}


def run(image: KernelImage) -> tuple[EmulationReport, str]:
    """The report, and what is wrong with the result ("" if nothing)."""
    inputs = random_inputs(SPEC)
    report = emulate(image, inputs, orders=3, max_findings=64)
    if "out" not in report.outputs:
        return report, "none"
    try:
        check(SPEC, inputs, report.outputs["out"])
    except Exception as error:
        return report, str(error)
    return report, ""


@pytest.mark.slow
def test_the_right_kernel_is_clean() -> None:
    report, wrong = run(right())
    assert not report.findings
    assert not wrong


def at_once(sms: int) -> KernelImage:
    """The product with all its clusters running at the same time."""
    tiles = TensorTiles(rows=128, columns=192, cluster=2, stages=2)
    small = replace(device("nvidia-h100"), sms=sms)
    image = lower(schedule_tiled_gemm(prim_func(SPEC), tiles=tiles), small).image
    return replace(image, launches=(replace(image.launches[0], cooperative=True),))


@pytest.mark.slow
def test_clusters_at_once_are_clean() -> None:
    """Multicasts, remote arrivals and products of each cluster reach its own CTAs."""
    image = at_once(4)
    assert image.launches[0].grid == (4, 1, 1)
    report, wrong = run(image)
    assert not report.findings
    assert not wrong


@pytest.mark.parametrize("name,lacks", [(RELEASE, "4 arrivals"), (MULTICAST, "24576 bytes")])
def test_fault_in_clusters_at_once_is_caught(name: str, lacks: str) -> None:
    wrong = at_once(4)
    for _ in range(2 if name == RELEASE else 1):
        wrong = drop_call(wrong, name)
    report, _ = run(wrong)
    found = [each.detail for each in report.findings if each.kind == "deadlock"]
    assert any(lacks in each for each in found), [str(each) for each in report.findings]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    make, kind, detail = FAULTS[name]
    report, wrong = run(make())
    if kind == "wrong result":
        assert wrong
        return
    found = [f"{each.kind}: {each.detail}" for each in report.findings]
    assert any(each.startswith(kind) and detail in each for each in found), found
