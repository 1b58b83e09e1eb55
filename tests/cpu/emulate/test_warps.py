"""Warp-wide operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, image, only, ramp, statement
from crossfuse.emulate.cuda import emulate

PAIR = [("A", (64,), "float32"), ("C", (64,), "float32")]


def test_shuffle_reduction() -> None:
    body = """
  float value = A[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset, 32);
  }
  value = __shfl_sync(0xffffffffu, value, 0, 32);
  C[threadIdx.x] = value;
"""
    sums = clean(image(body, PAIR), ramp(64))["C"].reshape(2, 32)
    np.testing.assert_array_equal(sums, np.repeat(ramp(2, 32).sum(1, keepdims=True), 32, axis=1))


def test_shuffles_by_section() -> None:
    body = """
  float value = A[threadIdx.x];
  float up = __shfl_up_sync(0xffffffffu, value, 1, 8);
  float swapped = __shfl_xor_sync(0xffffffffu, value, 3, 8);
  float last = __shfl_sync(0xffffffffu, value, 7, 8);
  C[threadIdx.x] = up + 100.0f * swapped + 10000.0f * last;
"""
    a = np.arange(64) % 8
    up, swapped = np.maximum(a - 1, 0), a ^ 3
    expected = up + 100 * swapped + 10000 * 7
    outputs = clean(image(body, PAIR), a.astype("float32"))
    np.testing.assert_array_equal(outputs["C"], expected)


def test_votes() -> None:
    body = """
  unsigned even = __ballot_sync(0xffffffffu, threadIdx.x % 2 == 0);
  int any = __any_sync(0xffffffffu, threadIdx.x == 40);
  int all = __all_sync(0xffffffffu, threadIdx.x < 32);
  C[threadIdx.x] = (even == 0x55555555u ? 100 : 0) + any * 10 + all;
"""
    votes = clean(image(body, [("C", (64,), "int32")]))["C"]
    np.testing.assert_array_equal(votes, np.repeat([101, 110], 32))


def test_half_precision_shuffle_in_a_short_warp() -> None:
    """Eight threads; the mask names 32 lanes, of which only these exist."""
    body = """
  half value = A[threadIdx.x];
  for (int lanes = 4; lanes > 0; lanes /= 2) {
    value = value + __shfl_xor_sync(0xffffffffu, value, lanes, 32);
  }
  C[threadIdx.x] = value;
"""
    buffers = [("A", (8,), "float16"), ("C", (8,), "float16")]
    img = image(body, buffers, block=8, preamble="#include <cuda_fp16.h>")
    np.testing.assert_array_equal(clean(img, ramp(8).astype("float16"))["C"], np.full(8, 28))


def test_active_mask_names_the_lanes_of_the_branch() -> None:
    body = """
  if (threadIdx.x % 32 < 8) {
    C[threadIdx.x] = __activemask();
  } else {
    C[threadIdx.x] = __activemask();
  }
"""
    masks = clean(image(body, [("C", (32,), "int32")], block=32))["C"].view("uint32")
    np.testing.assert_array_equal(masks, [0xFF] * 8 + [0xFFFFFF00] * 24)


NEIGHBOUR = """
  __shared__ alignas(64) float tile[64];
  tile[threadIdx.x] = A[threadIdx.x];
  __syncwarp();
  C[threadIdx.x] = tile[threadIdx.x ^ DISTANCE];
"""


def test_syncwarp_orders_lanes_of_a_warp() -> None:
    right = image(NEIGHBOUR, PAIR, preamble="#define DISTANCE 1")
    np.testing.assert_array_equal(clean(right, ramp(64))["C"], ramp(64)[np.arange(64) ^ 1])
    wrong = replace(right, cuda=right.cuda.replace("__syncwarp();", ";"))
    race = only(emulate(wrong, [ramp(64)]), "race")
    assert {race.first, race.second} == {
        statement(wrong, "tile[threadIdx.x] ="),
        statement(wrong, "= tile["),
    }
    assert "no CTA barrier or __syncwarp lies between" in race.detail


MEETINGS = {
    "a ballot": "int all = __ballot_sync(0xffffffffu, threadIdx.x >= 0) != 0;",
    "a vote": "int all = __any_sync(0xffffffffu, threadIdx.x >= 0);",
    "a shuffle": "int all = __shfl_sync(0xffffffffu, 1, 0, 32);",
}


@pytest.mark.parametrize("name", MEETINGS)
def test_what_lanes_tell_one_another_orders_no_memory(name: str) -> None:
    """They meet there all the same: the numbers are right in any order."""
    kernel = NEIGHBOUR.replace("__syncwarp();", MEETINGS[name] + " REST")
    kernel = kernel.replace("C[threadIdx.x] = ", "C[threadIdx.x] = all * ")
    ordered = image(kernel, PAIR, preamble="#define DISTANCE 1\n#define REST __syncwarp();")
    np.testing.assert_array_equal(clean(ordered, ramp(64))["C"], ramp(64)[np.arange(64) ^ 1])
    wrong = image(kernel, PAIR, preamble="#define DISTANCE 1\n#define REST")
    race = only(emulate(wrong, [ramp(64)]), "race")
    assert "no CTA barrier or __syncwarp lies between" in race.detail


def test_syncwarp_does_not_order_warps() -> None:
    wrong = image(NEIGHBOUR, PAIR, preamble="#define DISTANCE 32")
    assert only(emulate(wrong, [ramp(64)]), "race").buffer == "tile"


def test_partial_syncwarp_orders_only_the_lanes_it_names() -> None:
    body = """
  __shared__ alignas(64) float tile[32];
  tile[threadIdx.x] = A[threadIdx.x];
  unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
  __syncwarp(mask);
  C[threadIdx.x] = tile[threadIdx.x ^ DISTANCE];
"""
    buffers = [("A", (32,), "float32"), ("C", (32,), "float32")]
    clean(image(body, buffers, block=32, preamble="#define DISTANCE 15"), ramp(32))
    wrong = image(body, buffers, block=32, preamble="#define DISTANCE 16")
    assert only(emulate(wrong, [ramp(32)]), "race").buffer == "tile"


def test_lane_that_is_not_in_its_mask() -> None:
    body = """
  float value = __shfl_sync(0x0000ffffu, A[threadIdx.x], 0, 32);
  C[threadIdx.x] = value;
"""
    wrong = image(body, [("A", (32,), "float32"), ("C", (32,), "float32")], block=32)
    finding = next(f for f in emulate(wrong, [ramp(32)]).findings if "does not name it" in f.detail)
    assert finding.kind == "barrier-divergence"
    assert finding.first == statement(wrong, "__shfl_sync")


def test_lanes_that_miss_a_shuffle() -> None:
    body = """
  float value = A[threadIdx.x];
  if (threadIdx.x < 16) value = __shfl_sync(0xffffffffu, value, 0, 32);
  __syncthreads();
  C[threadIdx.x] = value;
"""
    wrong = image(body, [("A", (32,), "float32"), ("C", (32,), "float32")], block=32)
    finding = only(emulate(wrong, [ramp(32)]), "barrier-divergence")
    assert {finding.first, finding.second} == {
        statement(wrong, "__shfl_sync"),
        statement(wrong, "__syncthreads"),
    }
