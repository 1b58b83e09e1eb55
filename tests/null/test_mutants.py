"""Mutants of a kernel's synchronisation: which there are, and which are no fault, by rules."""

from __future__ import annotations

import pytest

from crossfuse.lower.image import KernelImage
from mutation.equivalent import is_of_groups, reason_of
from mutation.mutants import Mutant, mutate
from null.mutant_rules import ARRIVE, COPY, FENCE, MEET, PRODUCTS, RULES, WAIT

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
        "part 5: left out by all but one thread of a warp",
        "place 5: the barrier beside it",
        "parity 5: the other parity",
        "weaken 5: the scope of a wait is the CTA",
        "weaken 5: a relaxed wait",
        "move 5: behind `value = memory_ptr[0];`",
        "drop 7: left out",
        "part 7: left out by all but one thread of a warp",
        "move 7: before `value = memory_ptr[0];`",
        f"move 7: behind `{MEET}((uint)1, (uint)128);`",
        "drop 8: left out",
        "count 8: a warp more is expected",
        "count 8: a warp less is expected",
        "count 8: another barrier, for odd warps",
    ]


ONE = f"""\
__forceinline__ __device__ void {COPY}(unsigned __addr, const void* __map, unsigned __mbar) {{
}}
extern "C" __global__ void k() {{
  if ((((int)threadIdx.x) % 32) == 0) {{
    {FENCE}();
    tvm_builtin_ptx_mbarrier_arrive_x(empty[0]);
    {COPY}(a, m, full);
  }}
}}
"""


def test_what_one_thread_does_for_its_warp() -> None:
    """It cannot be left out by others; what it tells may come twice, or from another barrier."""
    assert mutants(ONE.replace(COPY, COPY + "_mbarrier")) == [
        "drop 5: left out",
        "move 5: behind `tvm_builtin_ptx_mbarrier_arrive_x(empty[0]);`",
        "drop 6: left out",
        "twice 6: done twice",
        "place 6: the barrier beside it",
        f"move 6: behind `{COPY}_mbarrier(a, m, full);`",
        "place 7: the barrier beside it counts the bytes",
    ]


def test_the_right_kernel_is_among_them() -> None:
    """Each line is still there, as what runs where no mutant is chosen."""
    mutated = mutate(KernelImage("k", TEXT, (), ()))
    lines = mutated.image.cuda.splitlines()
    for number, line in enumerate(TEXT.splitlines()[4:8], 5):
        assert line.strip() in lines[number - 1 + mutated.shift]
    assert f"{WAIT}_weaker_0((&(full[0])), parity);" in mutated.image.cuda
    assert mutated.image.cuda.count("acquire.cta") == 1


def test_an_arrival_is_relaxed_where_it_tells_nothing_new() -> None:
    lines = [f"{ARRIVE}(a);"]
    relaxed = Mutant(1, "weaken", 1, lines[0], "a relaxed arrival")
    assert "from others" in reason_of(lines, {1: True}, relaxed, {1: False})
    assert not reason_of(lines, {1: True}, relaxed, {1: True})
    assert not reason_of(lines, {1: True}, relaxed)
    left_out = Mutant(2, "drop", 1, lines[0], "left out")
    assert not reason_of(lines, {1: True}, left_out, {1: False})


def test_groups_alone_are_compared_by_what_releases_tell() -> None:
    for statement in (f"{PRODUCTS}1();", "tvm_builtin_ptx_cp_async_bulk_commit_group_x();"):
        assert is_of_groups(Mutant(1, "drop", 1, statement, "left out"))
    for statement in (f"{MEET}(1, 128);", f"{FENCE}();", f"{ARRIVE}(commit_group());"):
        assert not is_of_groups(Mutant(1, "drop", 1, statement, "left out"))


@pytest.mark.parametrize("name", RULES)
def test_rules_say_what_is_no_fault(name: str) -> None:
    lines, uses, operation, change, reason = RULES[name]
    line = max(uses, default=1)  # the last one that is watched
    found = reason_of(lines, uses, Mutant(1, operation, line, lines[line - 1].strip(), change))
    assert reason in found and bool(reason) == bool(found)
