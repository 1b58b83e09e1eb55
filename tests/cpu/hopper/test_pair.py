"""Gate and up by two CTAs of a cluster, one each: both checkers, the text, and faults."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.hopper.checkers import emulated, mixed_inputs, passed
from cpu.hopper.instructions import (
    ARRIVE,
    EXPECT,
    LEAVE,
    MAP,
    MEET,
    PUSH,
    RAISE,
    RECEIVED,
)
from cpu.hopper.persistent import unguarded, without_fences
from cpu.hopper.planting import one_changed
from cpu.schedule.steps import assert_same
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import CheckFailed
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin
from crossfuse.schedule.records import trace_json
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func, random_inputs

#: Workload, tiles of the first phase, and whether both phases are one kernel.
CASES: dict[str, tuple[str, dict[str, int], bool]] = {
    "64 rows": ("M=64,K=128,N=256,L=128,dtype=bfloat16", {"columns": 64}, True),
    "one row": ("M=1,K=64,N=256,L=64,dtype=bfloat16", {"columns": 40}, True),
    "the second half has no rows": ("M=16,K=72,N=256,L=64,dtype=float16", {"columns": 64}, True),
    "tails of rows and columns": ("M=100,K=64,N=384,L=128,dtype=bfloat16", {"columns": 72}, True),
    "two pairs a cluster": (
        "M=128,K=64,N=512,L=128,dtype=float16",
        {"columns": 48, "across": 2},
        True,
    ),
    "four pairs a cluster": (
        "M=64,K=64,N=512,L=256,dtype=bfloat16,weights=kn",
        {"columns": 64, "across": 4},
        True,
    ),
    "eight pairs a cluster": (
        "M=64,K=64,N=512,L=512,dtype=bfloat16",
        {"columns": 32, "across": 8},
        True,
    ),
    "rows of several tiles": ("M=200,K=64,N=256,L=64,dtype=bfloat16", {"columns": 128}, True),
    "8-bit floats": ("M=64,K=128,N=256,L=64,dtype=float8_e4m3fn,out=bfloat16", {}, True),
    "two kernels": ("M=128,K=64,N=256,L=64,dtype=bfloat16", {"columns": 64}, False),
    "wide tiles": ("M=64,K=64,N=512,L=64,dtype=bfloat16,act=gelu", {"columns": 256}, True),
}

_FIRST_OF_PAIR = "if (((int)tvm_builtin_cluster_ctaid_x()) == 0)"


def scheduled(name: str) -> Any:
    text, tiles, staged = CASES[name]
    return schedule_tiled_ffn(
        prim_func(parse(f"gated_ffn:{text}")),
        first=TensorTiles(**tiles, stages=2),
        second=TensorTiles(columns=64, stages=2),
        staged=staged,
        paired=True,
    )


@cache
def right(name: str) -> KernelImage:
    return lower(scheduled(name)).image


def body(image: KernelImage) -> str:
    return image.cuda[image.cuda.rindex("__global__") :]


@pytest.mark.parametrize("name", CASES)
def test_both_checkers_pass(name: str) -> None:
    text, tiles, staged = CASES[name]
    image = passed(parse(f"gated_ffn:{text}"), scheduled(name))
    assert len(image.launches) == (1 if staged else 2)
    assert image.launches[0].cluster == (2 * tiles.get("across", 1), 1, 1)


@pytest.mark.parametrize("name", ["64 rows", "two pairs a cluster"])
def test_adversarial_inputs(name: str) -> None:
    spec = parse(f"gated_ffn:{CASES[name][0]}")
    for inputs in mixed_inputs(spec):
        emulated(spec, right(name), inputs, orders=1)


def test_trace_replays_in_a_new_schedule() -> None:
    sch = scheduled("two pairs a cluster")
    text, _, _ = CASES["two pairs a cluster"]
    again = Schedule(prim_func(parse(f"gated_ffn:{text}")))
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


def test_each_cta_multiplies_by_its_own_weights() -> None:
    """One product a step, of twice the columns; the loader chooses the tensor map by the rank."""
    (kernel,) = recover(only_function(scheduled("64 rows")))
    first, second = kernel
    assert first.exchange is not None
    assert (first.exchange.pair, first.exchange.rows, first.exchange.place.extent) == (True, 32, 2)
    plan = plan_kernel(kernel, device("nvidia-h100"))
    (gate,), (up,) = plan.phases[0].rights, plan.phases[0].others
    assert (gate.map.name, up.map.name) == ("B_gate_map", "B_up_map")
    assert gate.shared_by == up.shared_by == ()
    left = plan.phases[0].left
    assert left is not None
    assert (left.sharers, left.tile.shape[0]) == (2, 64)
    # Warpgroups of both CTAs raise the flag of a tile; partial sums still lie where weights were.
    flags = plan.phases[0].raises
    assert flags is not None
    assert (flags.raisers, flags.rows) == (2, 64)
    assert plan.arena["paired"].size == 64 * 64 * 4
    assert plan.arena["received"].offset == plan.arena["right"].offset
    assert second.exchange is not None and not second.exchange.pair
    text = body(right("64 rows"))
    assert text.count(_FIRST_OF_PAIR) == 1


def test_nvcc_compiles_without_spills() -> None:
    (usage,) = compile_cubin(right("two pairs a cluster").cuda).resources
    assert (usage.spill_store_bytes, usage.spill_load_bytes, usage.advisories) == (0, 0, ())


def planted(name: str, pattern: str, by: str) -> KernelImage:
    """The first place of the kernel that a pattern finds, changed."""
    return one_changed(right(name), pattern, by, body=True)


def first_call(name: str, of: str, position: int, by: str) -> KernelImage:
    return change_argument(right(name), of, position, by)


_64 = "64 rows"
#: The case, what is wrong, and what the emulator reports; None: a wrong result.
FAULTS: dict[str, tuple[Any, str | None]] = {
    "a half is not sent": (lambda: drop_call(right(_64), PUSH), "deadlock"),
    "halves are kept": (lambda: first_call(_64, MAP, 2, "{} ^ 1"), "mbarrier"),
    "halves are sent in the warm-up": (lambda: unguarded(right(_64), PUSH), "async-race"),
    "the other half is awaited in the warm-up": (
        lambda: unguarded(right(_64), RECEIVED),
        "deadlock",
    ),
    "nobody waits for the other half": (lambda: drop_call(right(_64), RECEIVED), "async-race"),
    "nothing is announced": (lambda: announced(""), "deadlock"),
    "too little is announced": (lambda: announced("16368"), "async-race"),
    "too much is announced": (lambda: announced("16400"), "deadlock"),
    "both CTAs multiply by the gate's weights": (
        lambda: planted(_64, re.escape(_FIRST_OF_PAIR), "if (true)"),
        None,
    ),
    "the tile is not fenced for TMA": (lambda: without_fences(right(_64)), "async-race"),
    "warps do not meet before the flag": (lambda: drop_call(right(_64), MEET, 0), "race"),
    "the flag is not raised": (lambda: drop_call(right(_64), RAISE), "deadlock"),
    "a CTA leaves while its peer sends": (
        lambda: drop_call(drop_call(right("two kernels"), ARRIVE, 2), LEAVE, 1),
        "early-exit",
    ),
}


def announced(size: str) -> KernelImage:
    """Another number of bytes of both halves, 16384; none: no arrival at all."""
    call = rf"{EXPECT}\([^;]*\(uint\)16384\);"
    found = re.findall(call, body(right(_64)))[0]
    by = found.replace("16384", size) if size else ";"
    return planted(_64, re.escape(found), by)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    make, kind = FAULTS[name]
    case = "two kernels" if "leaves" in name else _64
    spec = parse(f"gated_ffn:{CASES[case][0]}")
    inputs = random_inputs(spec)
    if kind is None:
        with pytest.raises(CheckFailed):
            emulated(spec, make(), inputs)
        return
    report = emulate(make(), inputs, orders=3)
    assert kind in {each.kind for each in report.findings}, report.findings
