"""Mutants of a kernel's synchronisation: which there are, and which are no fault, by rules."""

from __future__ import annotations

import pytest

from crossfuse.emulate.cuda.equivalent import reason_of
from crossfuse.emulate.cuda.mutants import Mutant, mutate
from crossfuse.lower.image import KernelImage

WAIT = "tvm_builtin_cuda_mbarrier_wait"
MEET = "tvm_builtin_ptx_bar_sync_count_sync"
FENCE = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta"
EXPECT = "tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_shared_b64"
COPY = "tvm_builtin_ptx_cp_async_bulk_tensor_g2s_x"
TEXT = f"""\
__forceinline__ __device__ void {WAIT}(void* barrier, int phase) {{
  asm volatile("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64" :: "r"(phase));
}}
extern "C" __global__ void k() {{
  {WAIT}((&(full[0])), parity);
  value = memory_ptr[0];
  {FENCE}();
  {MEET}((uint)1, (uint)128);
}}
"""


def mutants(text: str = TEXT) -> list[str]:
    mutated = mutate(KernelImage("k", text, (), ()))
    assert [each.number for each in mutated.mutants] == list(range(1, len(mutated.mutants) + 1))
    return [f"{each.operation} {each.line}: {each.change}" for each in mutated.mutants]


def test_what_is_left_out_weakened_moved_and_counted_wrong() -> None:
    assert mutants() == [
        "drop 5: left out",
        "parity 5: the other parity",
        "weaken 5: the scope of a wait is the CTA",
        "move 5: behind `value = memory_ptr[0];`",
        "drop 7: left out",
        "move 7: before `value = memory_ptr[0];`",
        f"move 7: behind `{MEET}((uint)1, (uint)128);`",
        "drop 8: left out",
        "count 8: a warp more is expected",
        "count 8: a warp less is expected",
        "count 8: another barrier, for odd warps",
    ]


def test_the_right_kernel_is_among_them() -> None:
    """Each line is still there, as what runs where no mutant is chosen."""
    mutated = mutate(KernelImage("k", TEXT, (), ()))
    lines = mutated.image.cuda.splitlines()
    for number, line in enumerate(TEXT.splitlines()[4:8], 5):
        assert line.strip() in lines[number - 1 + mutated.shift]
    assert f"{WAIT}_weaker_0((&(full[0])), parity);" in mutated.image.cuda
    assert mutated.image.cuda.count("acquire.cta") == 1


RULES = {
    "a wait that never waits": (
        [f"{WAIT}(a, 1);"],
        {1: False},
        "drop",
        "left out",
        "from the start",
    ),
    "a wait that waits": ([f"{WAIT}(a, 1);"], {1: True}, "drop", "left out", ""),
    "the other parity of a wait that never waits": (
        [f"{WAIT}(a, 1);"],
        {1: False},
        "parity",
        "the other parity",
        "",
    ),
    "a line that never runs": ([f"{FENCE}();"], {}, "drop", "left out", "not come to"),
    "an arrival for nobody": ([f"{EXPECT}(a, 8);"], {1: False}, "drop", "left out", "nobody waits"),
    "bytes announced late": (
        [f"{EXPECT}(a, 8);", f"{COPY}(b);"],
        {1: True},
        "move",
        f"behind `{COPY}(b);`",
        "does not end before",
    ),
    "a fence behind the meeting": (
        [f"{FENCE}();", f"{MEET}(1, 128);"],
        {1: True},
        "move",
        f"behind `{MEET}(1, 128);`",
        "either side",
    ),
    "a fence behind the copy": (
        [f"{FENCE}();", f"{COPY}(b);"],
        {1: True},
        "move",
        f"behind `{COPY}(b);`",
        "",
    ),
    "a second fence": ([f"{FENCE}();", f"{FENCE}();"], {1: True}, "drop", "left out", "another"),
    "threads meet twice": (
        [f"{MEET}(1, 128);", "x = 1;", f"{MEET}(1, 128);"],
        {1: True},
        "drop",
        "left out",
        "did nothing between",
    ),
    "one thread waits and tells": (
        [
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) % 128) == 0) {",
            "  tvm_builtin_ptx_cp_async_bulk_wait_group_read_0();",
            "}",
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) & 127) < 1) {",
            "  tvm_builtin_ptx_mbarrier_arrive_x(a);",
            "}",
        ],
        {1: True, 5: True},
        "drop",
        "left out",
        "one thread alone",
    ),
    "one thread waits and all tell": (
        [
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) % 128) == 0) {",
            "  tvm_builtin_ptx_cp_async_bulk_wait_group_read_0();",
            "}",
            f"{MEET}(1, 128);",
            "if ((((int)threadIdx.x) & 127) < 2) {",
            "  tvm_builtin_ptx_mbarrier_arrive_x(a);",
            "}",
        ],
        {1: True, 5: True},
        "drop",
        "left out",
        "",
    ),
    "an arrival that comes later": (
        ["tvm_builtin_ptx_mbarrier_arrive_x(a);", "memory_ptr[0] = 1;"],
        {1: True},
        "move",
        "behind `memory_ptr[0] = 1;`",
        "tells of more",
    ),
    "an arrival that comes earlier": (
        ["memory_ptr[0] = 1;", "tvm_builtin_ptx_mbarrier_arrive_x(a);"],
        {2: True},
        "move",
        "before `memory_ptr[0] = 1;`",
        "",
    ),
    "threads store between": (
        [f"{MEET}(1, 128);", "memory_ptr[0] = 1;", f"{MEET}(1, 128);"],
        {1: True},
        "drop",
        "left out",
        "",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_say_what_is_no_fault(name: str) -> None:
    lines, uses, operation, change, reason = RULES[name]
    line = max(uses, default=1)  # the last one that is watched
    found = reason_of(lines, uses, Mutant(1, operation, line, lines[line - 1], change))
    assert reason in found and bool(reason) == bool(found)
