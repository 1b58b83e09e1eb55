"""Planting faults in text: what is edited, and refusals where there is nothing to edit."""

from __future__ import annotations

import pytest

from cpu.emulate.kernels import clean, exchange, image, only, ramp, reverse, statement
from crossfuse.emulate.cuda import (
    early_exit,
    emulate,
    recycle_slab,
    remove_cluster_barrier,
    wrong_rank,
)
from crossfuse.errors import CheckFailed
from crossfuse.lower.image import KernelImage

SYNC = "crossfuse_cluster_sync()"


def changed(before: KernelImage, after: KernelImage) -> list[tuple[str, str]]:
    lines = zip(before.cuda.splitlines(), after.cuda.splitlines(), strict=True)
    return [(a.strip(), b.strip()) for a, b in lines if a != b]


def test_barriers_are_removed_one_by_one() -> None:
    right = exchange()
    first, last = remove_cluster_barrier(right, 0), remove_cluster_barrier(right, 1)
    assert changed(right, first) == changed(right, last) == [(f"{SYNC};", "(void)0;")]
    assert first != last and early_exit(right) == last == remove_cluster_barrier(right, -1)


def test_ranks_are_shifted_in_the_call() -> None:
    right = exchange()
    assert changed(right, wrong_rank(right))[0][1].endswith("[threadIdx.x], ((rank) + 1)));")
    assert "((rank) + 1) % 4)" in changed(right, wrong_rank(right, wrap=True))[0][1]


MERGED = """
  extern __shared__ __align__(64) unsigned char buf_dyn_shmem[];
  ((float*)buf_dyn_shmem)[threadIdx.x] = A[threadIdx.x];
  *(float2*)(((float*)buf_dyn_shmem) + ((((int)threadIdx.x) * 2) + 64)) = make_float2(1.0f, 2.0f);
  __syncthreads();
  float mirrored = ((float*)buf_dyn_shmem)[(63 - ((int)threadIdx.x))];
  C[threadIdx.x] = mirrored + ((float*)buf_dyn_shmem)[((((int)threadIdx.x) * 2) + 65)];
"""


def test_recycled_slab_is_caught() -> None:
    right = image(MERGED, [("A", (64,), "float32"), ("C", (64,), "float32")], shared=768)
    assert clean(right, ramp(64))["C"][0] == 65
    wrong = recycle_slab(right, (256, 512), 0)
    assert [after for _, after in changed(right, wrong)] == [
        "*(float2*)(((float*)buf_dyn_shmem) + (((((int)threadIdx.x) * 2)) + 0)) = "
        "make_float2(1.0f, 2.0f);",
        "C[threadIdx.x] = mirrored + ((float*)buf_dyn_shmem)[((((int)threadIdx.x) * 2)) + 1];",
    ]
    report = emulate(wrong, [ramp(64)])
    race = next(finding for finding in report.findings if finding.kind == "race")
    assert race.buffer == "shared memory"
    assert {race.first, race.second} == {
        statement(wrong, "= A[threadIdx.x]"),
        statement(wrong, "make_float2"),
    }


def test_nothing_to_edit() -> None:
    plain = reverse()
    message = r"plant-fault: generated text of k: found 0 calls of crossfuse_cluster_sync; limit: "
    with pytest.raises(CheckFailed, match=message + "one with index 0"):
        remove_cluster_barrier(plain)
    with pytest.raises(CheckFailed, match=message + "one with index -1"):
        early_exit(plain)
    with pytest.raises(CheckFailed, match=r"found 2 calls .*one with index 2"):
        remove_cluster_barrier(exchange(), 2)
    with pytest.raises(CheckFailed, match="found 0 remote accesses"):
        wrong_rank(plain)
    with pytest.raises(CheckFailed, match=r"accesses at bytes \[\]; limit: one at bytes 0 to 63"):
        recycle_slab(plain, (0, 64), 128)


def test_a_removed_helper_definition_is_never_touched() -> None:
    """dsm.cuh defines the names too; only calls in kernels are edited."""
    right = exchange()
    header = right.cuda[: right.cuda.index("__global__")]
    for edited in (early_exit(right), wrong_rank(right), wrong_rank(right, -1)):
        assert edited.cuda.startswith(header)
    only(emulate(wrong_rank(right), [ramp(2, 4, 32)]), "bad-rank")
