"""Faults planted in an FFN that is one persistent kernel, each with the finding that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cpu.hopper.instructions import ARRIVE, EXPECT, LEAVE, MAP, MEET, PUSH, RAISE, RECEIVED, WAIT
from cpu.hopper.persistent import (
    AWAIT,
    BOX,
    CASES,
    FENCE_OF_AWAIT,
    FENCE_OF_RAISE,
    LANDED,
    PRODUCTS,
    REMOTE,
    STORE,
    WEIGHTED,
    changed,
    dropped,
    early,
    planted,
    right,
    spec_of,
    unfenced,
)
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.lower.image import KernelImage
from crossfuse.workload import check, random_inputs

FLAG = "no release and acquire of a flag"
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
    "a release to the cluster alone": (
        "boxes",
        lambda case: planted(case, "red.release.gpu", "red.release.cluster"),
        "race",
        FLAG,
    ),
    "an acquire from the cluster alone": (
        "boxes",
        lambda case: planted(case, "ld.acquire.gpu", "ld.acquire.cluster"),
        "race",
        FLAG,
    ),
    "an acquire from the CTA alone": (
        "elements",
        lambda case: planted(case, "ld.acquire.gpu", "ld.acquire.cta"),
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
        "race|uninitialised-read",  # what comes first
        "hidden",
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
        lambda case: early(case, BOX),
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
    "elements stored in the warm-up": ("elements", lambda case: early(case, STORE)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_fault_is_not_reported(name: str) -> None:
    """A proxy fence on one side of the flag is enough; a thread may store again what it stored."""
    case, make = HARMLESS[name]
    emulate(make(case), random_inputs(spec_of(case)), orders=2).raise_if_wrong()
