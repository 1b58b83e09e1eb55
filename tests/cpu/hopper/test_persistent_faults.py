"""Faults planted in an FFN that is one persistent kernel, each with the finding that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import WorkloadSpec, check, parse, prim_func, random_inputs

# Two stages make both phases use the same memory, and partial sums take the place of right tiles.
CASES = {
    "boxes": ("M=64,K=128,N=512,L=128", {"columns": 32}),
    "elements": ("M=64,K=128,N=256,L=128", {"columns": 24}),
    "across": ("M=64,K=128,N=512,L=128", {"columns": 32, "cluster": 2, "across": 2}),
    "two warpgroups": ("M=128,K=64,N=512,L=64", {"columns": 32, "cluster": 2}),
}
GUARD = "0 < crossfuse_hide(turn)"
RAISE, AWAIT = "crossfuse_raise_flag", "crossfuse_await_flags"
LANDED = r"tvm_builtin_ptx_cp_async_bulk_wait_group_async_bulk_wait_group_0"
WAIT = "tvm_builtin_cuda_mbarrier_wait"
RECEIVED = "tvm_builtin_cuda_mbarrier_wait_acquire_cluster"
EXPECT = r"tvm_builtin_ptx_mbarrier_arrive_expect_tx\w+"
REMOTE = r"tvm_builtin_ptx_mbarrier_arrive\w*_shared__cluster_b64"
WEIGHTED = "tvm_builtin_ptx_mbarrier_arrive_arrive_shared_b64"
MAP = r"tvm_builtin_ptx_mapa\w+"
PUSH = r"tvm_builtin_ptx_st_async\w+"
BOX = r"tvm_builtin_ptx_cp_async_bulk_tensor_s2g\w+"
STORE = "tvm_builtin_ptx_st_global_u32"
FENCE = r"tvm_builtin_ptx_fence_proxy\w+"
MEET = r"tvm_builtin_ptx_bar_sync\w+"
PRODUCTS = r"tvm_builtin_ptx_wgmma_wait_group\w+_0"
ARRIVE = r"tvm_builtin_ptx_barrier_cluster_arrive\w+"
LEAVE = r"tvm_builtin_ptx_barrier_cluster_wait\w+"


def spec_of(case: str) -> WorkloadSpec:
    return parse(f"gated_ffn:{CASES[case][0]},dtype=bfloat16")


@cache
def right(case: str) -> KernelImage:
    first = TensorTiles(**CASES[case][1], stages=2)
    second = TensorTiles(columns=64, stages=2)
    func = prim_func(spec_of(case))
    return lower(schedule_tiled_ffn(func, first=first, second=second)).image


def planted(case: str, pattern: str, by: str, index: int = 0) -> KernelImage:
    """One place of the text changed."""
    image = right(case)
    found = list(re.finditer(pattern, image.cuda))[index]
    text = image.cuda[: found.start()] + found.expand(by) + image.cuda[found.end() :]
    return replace(image, cuda=text)


def dropped(case: str, name: str, index: int = 0) -> KernelImage:
    return drop_call(right(case), name, index)


def changed(case: str, name: str, position: int, by: str, index: int = 0) -> KernelImage:
    return change_argument(right(case), name, position, by, index)


def early(case: str, name: str, index: int = 0) -> KernelImage:
    """A statement that the warm-up no longer leaves out."""
    image = right(case)
    body = image.cuda.rindex("__global__")
    call = [each.start() for each in re.finditer(rf"\b{name}\(", image.cuda[body:])][index] + body
    guard = image.cuda.rindex(GUARD, 0, call)
    text = image.cuda[:guard] + "true" + image.cuda[guard + len(GUARD) :]
    return replace(image, cuda=text)


def unfenced(case: str) -> KernelImage:
    """Without the proxy fences on either side of a flag, and after the stores of each thread."""
    raising = planted(case, FENCE_OF_RAISE, r"\1")
    both = re.sub(FENCE_OF_AWAIT, r"\1", raising.cuda)
    return drop_call(replace(raising, cuda=both), FENCE)


FLAG = "no release and acquire of a flag"
# The proxy fences of what raises and of what awaits a flag.
FENCE_OF_RAISE = r'(void crossfuse_raise_flag.*\n  asm volatile\(")fence.proxy.async;'
FENCE_OF_AWAIT = r'(__syncwarp\(\);\n  asm volatile\(")fence.proxy.async;'
COUNT = r"(crossfuse_flags_0_ptr\[[^;]*\] = )\(launches_before \+ \(uint\)1\);"

FAULTS: dict[str, tuple[str, Callable[[str], KernelImage], str, str]] = {
    "a flag is not raised": (
        "boxes",
        lambda case: dropped(case, RAISE),
        "deadlock",
        "of crossfuse_flags_0, which stays 0",
    ),
    "the flag of another tile is raised": (
        "boxes",
        lambda case: changed(case, RAISE, 0, "{} + 1"),
        "race",
        FLAG,
    ),
    "a flag counts twice": (
        "boxes",
        lambda case: planted(case, r'"l"\(flag\), "r"\(1\)', '"l"(flag), "r"(2)'),
        "deadlock",
        "of crossfuse_flags_0, which stays 2",
    ),
    "a flag raised while boxes are copied": (
        "boxes",
        lambda case: dropped(case, LANDED),
        "race",
        "the copy is not waited for",
    ),
    "a flag raised when boxes have been read": (
        "boxes",
        lambda case: planted(case, LANDED + r"(?=\(\);\s+if \()", LANDED.replace("_0", "_read_0")),
        "race",
        "the copy is not waited for",
    ),
    "a flag raised before all threads have stored": (
        "elements",
        lambda case: dropped(case, MEET),
        "race",
        FLAG,
    ),
    "a relaxed release after boxes": (
        "boxes",
        lambda case: planted(case, "red.release", "red.relaxed"),
        "race",
        FLAG,
    ),
    "a relaxed release after elements": (
        "elements",
        lambda case: planted(case, "red.release", "red.relaxed"),
        "race",
        "hidden",
    ),
    "a relaxed acquire of boxes": (
        "boxes",
        lambda case: planted(case, "ld.acquire", "ld.relaxed"),
        "race",
        FLAG,
    ),
    "a relaxed acquire of elements": (
        "elements",
        lambda case: planted(case, "ld.acquire", "ld.relaxed"),
        "race",
        "hidden",
    ),
    "no proxy fence after the acquire": (
        "boxes",
        lambda case: planted(case, FENCE_OF_AWAIT, r"\1"),
        "async-race",
        "no fence.proxy.async lies between the acquire and",
    ),
    "no proxy fence at all": (
        "elements",
        lambda case: unfenced(case),
        "async-race",
        "fence.proxy.async",
    ),
    "a wait for a tile too few, of boxes": (
        "boxes",
        lambda case: changed(case, AWAIT, 2, "{} - 1"),
        "race",
        FLAG,
    ),
    "a wait for a tile too few, of elements": (
        "elements",
        lambda case: changed(case, AWAIT, 2, "{} - 1"),
        "race",
        "hidden",
    ),
    "a wait that begins a tile too late": (
        "boxes",
        lambda case: changed(case, AWAIT, 1, "{} + 1"),
        "race",
        FLAG,
    ),
    "a wait for the next launch": (
        "boxes",
        lambda case: changed(case, AWAIT, 4, "{} + 1"),
        "deadlock",
        "of crossfuse_flags_0, which stays 1",
    ),
    "a wait for the launch before": (
        "boxes",
        lambda case: changed(case, AWAIT, 4, "{} - 1"),
        "race",
        FLAG,
    ),
    "a wait for the first launch, always": (
        "boxes",
        lambda case: changed(case, AWAIT, 4, "(uint)1"),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "a launch is not counted": (
        "boxes",
        lambda case: planted(case, COUNT, r"\1launches_before;"),
        "uninitialised-read",
        "before anything wrote it",
    ),
    "a launch counted before all lanes know its number": (
        "boxes",
        lambda case: dropped(case, "tvm_builtin_cuda_warp_sync"),
        "race",
        "__syncwarp",
    ),
    "a wait for one warpgroup of two": (
        "two warpgroups",
        lambda case: changed(case, AWAIT, 4, "launches_before + 1"),
        "race",
        FLAG,
    ),
    "tiles are not said to be used up": (
        "boxes",
        lambda case: dropped(case, REMOTE, -1),
        "deadlock",
        "lacks 4 arrivals and 0 bytes",
    ),
    "tiles are said to be used up too early": (
        "boxes",
        lambda case: dropped(case, PRODUCTS, 1),
        "async-race",
        "tile",
    ),
    "nobody waits until tiles are used up": (
        "across",
        lambda case: dropped(case, WAIT, -1),
        "async-race",
        "a store writes a tile that is still being multiplied",
    ),
    "the wrong CTAs are told that tiles are used up": (
        "across",
        lambda case: changed(case, MAP, 2, "{} ^ 2", -1),
        "async-race",
        "tile",
    ),
    "a part is not sent": (
        "boxes",
        lambda case: dropped(case, PUSH),
        "deadlock",
        "lacks 0 arrivals and 2048 bytes",
    ),
    "a part is sent to the wrong CTA": (
        "across",
        lambda case: changed(case, MAP, 2, "{} ^ 2", 1),
        "mbarrier",
        "a barrier of another CTA than it stores to",
    ),
    "too many bytes are expected": (
        "boxes",
        lambda case: changed(case, EXPECT, 1, "{} + 512", -1),
        "deadlock",
        "lacks 0 arrivals and 512 bytes",
    ),
    "too few bytes are expected": (
        "boxes",
        lambda case: changed(case, EXPECT, 1, "{} - 512", -1),
        "async-race",
        "reads what is still being stored",
    ),
    "nobody waits for what is sent": (
        "boxes",
        lambda case: dropped(case, RECEIVED),
        "async-race",
        "reads what is still being stored",
    ),
    "a stage is handed back to one CTA only": (
        "across",
        lambda case: changed(case, MAP, 2, "0", 0),
        "deadlock",
        "mbarrier at byte",
    ),
    "a stage is handed back to the wrong CTAs": (
        "across",
        lambda case: changed(case, MAP, 2, "{} ^ 1", 3),
        "async-race|deadlock|mbarrier",  # what comes first
        "",
    ),
    "a release that counts too little": (
        "across",
        lambda case: changed(case, REMOTE, 1, "(uint)1", 2),
        "deadlock",
        "lacks 1 arrivals and 0 bytes",
    ),
    "a release that counts too much": (
        "two warpgroups",
        lambda case: changed(case, WEIGHTED, 1, "(uint)3"),
        "mbarrier",
        "an arrival too many",
    ),
    "peers are not waited for at the end": (
        "boxes",
        lambda case: drop_call(dropped(case, ARRIVE, -1), LEAVE, -1),
        "early-exit",
        "may exit while",
    ),
    "the warm-up sends": (
        "boxes",
        lambda case: early(case, PUSH),
        "async-race",
        "",
    ),
    "the warm-up announces": (
        "boxes",
        lambda case: early(case, REMOTE, -1),
        "mbarrier",
        "an arrival too many",
    ),
    "the warm-up waits for what is sent": (
        "boxes",
        lambda case: early(case, RECEIVED),
        "deadlock",
        "of crossfuse_flags_0, which stays 0",
    ),
    "the warm-up adds what was received": (
        "boxes",
        lambda case: early(case, r"tvm_builtin_ptx_ld_vec\w+"),
        "async-race",
        "reads what is still being stored",
    ),
    "the warm-up multiplies": (
        "boxes",
        lambda case: early(case, "tvm_builtin_ptx_wgmma_fence_fence_sync_aligned"),
        "deadlock",
        "of crossfuse_flags_0, which stays 0",
    ),
    "the warm-up raises a flag after boxes": (
        "boxes",
        lambda case: early(case, RAISE),
        "race",
        FLAG,
    ),
    "the warm-up copies a box that nobody waits for": (
        "boxes",
        lambda case: drop_call(early(case, BOX), LANDED, 1),
        "race",
        "the copy is not waited for",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_right_kernel_is_clean(case: str) -> None:
    """Every order is a further launch on the same flags."""
    inputs = random_inputs(spec_of(case))
    report = emulate(right(case), inputs, orders=3)
    report.raise_if_wrong()
    check(spec_of(case), inputs, report.outputs["out"])
    assert right(case).launches[0].cooperative


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    case, make, kind, detail = FAULTS[name]
    # Whoever waits looks further ahead than it must, so a wait too short needs an order in which
    # that does not help.
    orders = 4 if "too few" in name else 2
    report = emulate(make(case), random_inputs(spec_of(case)), orders=orders, max_findings=32)
    found, kinds = [str(each) for each in report.findings], kind.split("|")
    named = [text for each, text in zip(report.findings, found, strict=True) if each.kind in kinds]
    assert any(detail in each for each in named), found


HARMLESS = {
    "one of two fences before a TMA load of elements": (
        "elements",
        lambda case: planted(case, FENCE_OF_RAISE, r"\1"),
    ),
    "a box copied in the warm-up, and waited for": ("boxes", lambda case: early(case, BOX)),
    "elements stored in the warm-up": ("elements", lambda case: early(case, STORE)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_fault_is_not_reported(name: str) -> None:
    """A proxy fence on one side of the flag is enough; a thread may store again what it stored."""
    case, make = HARMLESS[name]
    emulate(make(case), random_inputs(spec_of(case)), orders=2).raise_if_wrong()
