"""What one GPU runs of a function over ranks: its buffers, and barriers around its kernels."""

from __future__ import annotations

import re

import pytest
import tvm

from cpu.schedule.ranks import CASES, scheduled
from crossfuse.lower.extract import lower
from crossfuse.lower.image import WINDOW_UNIT
from crossfuse.lower.ranks import window_row


def test_own_buffers_are_slices_and_peers_are_windows() -> None:
    image = lower(scheduled("reduce-scatter")).image
    row = WINDOW_UNIT // 4
    assert [(each.name, each.shape, each.output, each.ranks) for each in image.buffers] == [
        ("A", (16, 64), False, 0),
        ("B", (64, 32), False, 0),
        ("C", (8, 32), True, 0),
        ("crossfuse_rank", (1,), False, 0),
        ("crossfuse_arrivals", (2, row), True, 2),
        ("C_rf_global_peer", (2, row), True, 2),
    ]


def test_slabs_begin_at_units_of_memory() -> None:
    assert window_row(1, "float16") * 2 == WINDOW_UNIT
    assert window_row(WINDOW_UNIT // 4, "float32") * 4 == WINDOW_UNIT
    assert window_row(WINDOW_UNIT // 4 + 1, "float32") * 4 == 2 * WINDOW_UNIT
    assert window_row(1, "float32", 2 * WINDOW_UNIT + 1) * 4 == 3 * WINDOW_UNIT


@pytest.mark.parametrize("case", CASES)
def test_each_kernel_waits_first_and_arrives_last(case: str) -> None:
    text = lower(scheduled(case)).image.cuda
    bodies = re.findall(r"\nextern \"C\" __global__[^;{]*\{\n(.*?)\n\}\n", text, re.S)
    assert len(bodies) == 2
    for body in bodies:
        first, *_, last = body.splitlines()
        assert "crossfuse_await_ranks(" in first
        assert "crossfuse_arrive_at_ranks(" in last


def test_peers_memory_is_neither_constant_nor_ones_own() -> None:
    """Else nvcc loads it through the read-only cache."""
    text = lower(scheduled("all-reduce")).image.cuda
    heads = re.findall(r"__global__[^;{]*\{", text)
    assert all(re.search(r"[(,] *float\* C_rf_global_peer_ptr[,)]", each) for each in heads)
    assert all("int* crossfuse_arrivals_ptr" in each for each in heads)
    assert "__restrict__ A_ptr" in heads[0] and "__restrict__ C_ptr" not in heads[1]


def test_tvm_does_not_build_a_function_over_several_gpus() -> None:
    with pytest.raises(Exception, match="found a function over several GPUs"):
        tvm.compile(scheduled("all-reduce").mod, "cuda")
