"""Slices of a cluster by bulk copies, and in ring order: both checkers, the text, and faults."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cpu.hopper.checkers import caught, emulated, mixed_inputs, passed
from cpu.hopper.instructions import (
    ARRIVE,
    COPY,
    EXPECT,
    FENCE,
    LEAVE,
    MEET,
    PUSH,
    RECEIVED,
)
from cpu.hopper.planting import one_changed
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.rules.parted_tiles import ClusterTiles
from crossfuse.workload import parse, prim_func, random_inputs

#: Workload; rows, cluster size and parts; how slices pass.
CASES = {
    "bulk, one CTA": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16", (64, 1, 1), "bulk"),
    "bulk, 2": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=gelu", (64, 2, 1), "bulk"),
    "bulk, 3": ("gated_ffn:M=64,K=64,N=192,L=72,dtype=float16", (64, 3, 1), "bulk"),
    "bulk, 8": ("gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16", (128, 8, 1), "bulk"),
    "bulk, 16": ("gemm_chain:M=64,K=32,N=256,L=128,dtype=bfloat16", (64, 16, 1), "bulk"),
    "bulk, parts": ("gated_ffn:M=1,K=64,N=512,L=64,dtype=bfloat16", (64, 4, 2), "bulk"),
    "ring, one CTA": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16", (64, 1, 1), "ring"),
    "ring, 2": ("gemm_chain:M=64,K=64,N=256,L=64,dtype=bfloat16,weights=nk", (64, 2, 1), "ring"),
    "ring, 3": ("gemm_chain:M=100,K=72,N=192,L=48,dtype=float16,act=relu", (64, 3, 1), "ring"),
    "ring, 4": ("gemm_chain:M=128,K=136,N=512,L=64,dtype=bfloat16", (128, 4, 1), "ring"),
    "ring, 8": ("gemm_chain:M=1,K=64,N=256,L=64,dtype=bfloat16", (64, 8, 1), "ring"),
    "ring, 16": ("gemm_chain:M=64,K=32,N=512,L=128,dtype=bfloat16,act=relu", (64, 16, 1), "ring"),
    "ring, parts": ("gated_ffn:M=33,K=64,N=768,L=64,dtype=bfloat16", (64, 2, 3), "ring"),
    "ring, one step": ("gemm_chain:M=64,K=64,N=64,L=64,dtype=bfloat16", (64, 2, 1), "ring"),
    "ring, short steps": ("gemm_chain:M=64,K=64,N=192,L=64,dtype=bfloat16", (64, 4, 1), "ring"),
    "both, 2": ("gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16,act=relu", (64, 2, 1), "ring bulk"),
    "both, 3": ("gated_ffn:M=64,K=64,N=384,L=72,dtype=bfloat16", (64, 3, 2), "ring bulk"),
    "both, 8": ("gemm_chain:M=16,K=64,N=512,L=64,dtype=bfloat16", (64, 8, 2), "ring bulk"),
    "both, 16": ("gemm_chain:M=128,K=32,N=256,L=128,dtype=bfloat16", (128, 16, 1), "ring bulk"),
}


def scheduled(name: str) -> Any:
    text, tiles, how = CASES[name]
    return schedule_clustered_ffn(
        prim_func(parse(text)), tiles=ClusterTiles(*tiles), ring="ring" in how, bulk="bulk" in how
    )


@cache
def right(name: str) -> KernelImage:
    return lower(scheduled(name)).image


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, (_, cluster, _), how = CASES[name]
    image = passed(parse(text), scheduled(name))
    (launch,) = image.launches
    assert launch.cluster == (cluster, 1, 1)
    body = image.cuda[image.cuda.rindex("__global__") :]
    copies, pushes, waits = (
        len(re.findall(rf"\b{each}\(", body)) for each in (COPY, PUSH, RECEIVED)
    )
    assert bool(copies) == (cluster > 1 and "bulk" in how)
    assert bool(pushes) == (cluster > 1 and "bulk" not in how)
    # One wait, which a ring passes once for each slice.
    assert waits == (cluster > 1)
    assert body.count("int step_of_ring") == (2 if "ring" in how and cluster > 1 else 0)


@pytest.mark.parametrize("name", ["both, 2", "ring, parts"])
def test_adversarial_inputs(name: str) -> None:
    spec = parse(CASES[name][0])
    for inputs in mixed_inputs(spec):
        emulated(spec, right(name), inputs, orders=1)


def test_wgmma_needs_no_fence_behind_bulk_copies() -> None:
    fences = [
        len(re.findall(rf"\b{FENCE}\(", right(name).cuda[right(name).cuda.rindex("__global__") :]))
        for name in ("bulk, 2", "ring, 2")
    ]
    # One in front of boxes of the output, one behind the own slice.
    assert fences == [2, 3]


def test_each_rank_begins_with_its_own_slice() -> None:
    """The loader of right tiles and the multiplying warpgroups go the same way."""
    text = right("ring, 4").cuda
    rotated = re.findall(r"int step_of_ring\w* = (.*);", text)
    assert [re.sub(r"step_\d+", "step", each) for each in rotated] == [
        "(((((int)tvm_builtin_cluster_ctaid_x()) * 4) + step) & 15)"
    ] * 2


@pytest.mark.parametrize("name", ["ring, 4", "both, 3"])
def test_nvcc_compiles_without_spills(name: str) -> None:
    (usage,) = compile_cubin(right(name).cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.advisories) == (0, 0, ())


def planted(name: str, pattern: str, by: str, index: int = 0) -> KernelImage:
    """One place of the text changed."""
    return one_changed(right(name), pattern, by, index)


def unguarded(image: KernelImage) -> KernelImage:
    """Nobody waits for the cluster at the end."""
    return drop_call(drop_call(image, ARRIVE, -1), LEAVE, -1)


def stored_again() -> KernelImage:
    """The last columns of a slice are stored once more behind its copies."""
    image = right("bulk, 2")
    copy = re.search(rf"{COPY}\(", image.cuda[image.cuda.rindex("__global__") :])
    assert copy is not None
    behind = image.cuda.rindex("__global__") + copy.end()
    *_, store = re.findall(r"tvm_builtin_ptx_stmatrix[^;]*;", image.cuda[:behind])
    place = image.cuda.index("alignas(64) uint64_t left_tile_ptr_1", behind)
    return replace(image, cuda=image.cuda[:place] + store + image.cuda[place:])


@pytest.mark.parametrize(
    ("name", "make", "details"),
    [
        ("bulk, 2", stored_again, {"a store overwrites what a copy still reads"}),
        # Two copies, of which either may be issued first.
        (
            "bulk, 3",
            lambda: change_argument(right("bulk, 3"), COPY, 0, "{} + 8192", 0),
            {"a copy reads what another still writes", "a store writes what a copy still reads"},
        ),
    ],
    ids=["by a store", "by a copy"],
)
def test_slice_that_changes_while_it_is_copied(name: str, make: Any, details: set[str]) -> None:
    report = emulate(make(), random_inputs(parse(CASES[name][0])), orders=4)
    assert details & {each.detail for each in report.findings}, report.findings


_STEP = r"(int step_of_ring\w* = )(.*);"
#: What is wrong: the image, and what the emulator reports; None: a wrong result.
FAULTS: dict[str, tuple[str, Any, str | None]] = {
    "a slice is not copied": ("bulk, 3", lambda: drop_call(right("bulk, 3"), COPY), "deadlock"),
    "too little is copied": (
        "bulk, 3",
        lambda: change_argument(right("bulk, 3"), COPY, 2, "{} - 16", 0),
        "deadlock",
    ),
    "too much is copied": (
        "bulk, 3",
        lambda: change_argument(right("bulk, 3"), COPY, 2, "{} + 16", 0),
        "async-race",
    ),
    "half a piece is copied": (
        "bulk, 2",
        lambda: change_argument(right("bulk, 2"), COPY, 2, "{} - 8", 0),
        "misaligned",
    ),
    "a slice is copied elsewhere": (
        "bulk, 3",
        lambda: change_argument(right("bulk, 3"), COPY, 0, "{} + 4096", 0),
        "async-race",
    ),
    "the copy completes a barrier at home": (
        "bulk, 3",
        lambda: planted("bulk, 3", rf"({COPY}\(.*, )arrival_ptr\[0\]\)", r"\1target_ptr[0])"),
        "mbarrier",
    ),
    "too few bytes of copies are waited for": (
        "bulk, 3",
        lambda: change_argument(right("bulk, 3"), EXPECT, 1, "{} - 1024", -1),
        "deadlock",
    ),
    "too many bytes of copies are waited for": (
        "bulk, 3",
        lambda: change_argument(right("bulk, 3"), EXPECT, 1, "{} + 1024", -1),
        "deadlock",
    ),
    "the slice is not fenced before it is copied": (
        "bulk, 2",
        lambda: drop_call(right("bulk, 2"), FENCE, 0),
        "async-race",
    ),
    "warps do not meet before the slice is copied": (
        "bulk, 2",
        lambda: drop_call(right("bulk, 2"), MEET, 0),
        "async-race",
    ),
    "nobody waits for copies": (
        "bulk, 2",
        lambda: drop_call(right("bulk, 2"), RECEIVED, 0),
        "async-race",
    ),
    "a CTA leaves while peers copy": ("bulk, 2", lambda: unguarded(right("bulk, 2")), "early-exit"),
    "nobody waits for slices": (
        "ring, 3",
        lambda: drop_call(right("ring, 3"), RECEIVED, 0),
        "async-race",
    ),
    "the slice of another CTA is waited for": (
        "ring, 3",
        lambda: change_argument(right("ring, 3"), RECEIVED, 0, "(char*){} - 8", 0),
        "deadlock",
    ),
    "a slice is announced to nobody": (
        "ring, 3",
        lambda: drop_call(right("ring, 3"), EXPECT, -1),
        "deadlock",
    ),
    "too few bytes of a slice are waited for": (
        "ring, 3",
        lambda: change_argument(right("ring, 3"), EXPECT, 1, "{} - 16", -1),
        "async-race",
    ),
    "what peers store is not fenced": (
        "both, 2",
        lambda: drop_call(right("both, 2"), FENCE, 0),
        "async-race",
    ),
    "right tiles come in the order of ranks": (
        "ring, 3",
        lambda: planted("ring, 3", _STEP, r"\1step;", 0),
        None,
    ),
    "left tiles are taken in the order of ranks": (
        "ring, 3",
        lambda: planted("ring, 3", _STEP, r"\1step_1;", 1),
        None,
    ),
    "a CTA leaves while peers send": (
        "ring, 3",
        lambda: unguarded(drop_call(right("ring, 3"), RECEIVED, 0)),
        "early-exit",
    ),
}


def test_who_has_received_everything_may_leave() -> None:
    """The waits for slices count all that peers send; the cluster need not meet once more."""
    image = unguarded(right("ring, 3"))
    report = emulate(image, random_inputs(parse(CASES["ring, 3"][0])), orders=2)
    assert report.findings == ()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    case, make, kind = FAULTS[name]
    caught(parse(CASES[case][0]), make(), kind)
