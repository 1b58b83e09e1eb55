"""CTA barriers: shared memory with and without them, divergence, deadlock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, image, only, ramp, reverse, statement
from crossfuse.emulate.cuda import emulate

PAIR = [("A", (64,), "float32"), ("C", (64,), "float32")]


def test_vector_add_is_clean() -> None:
    buffers = [("A", (4, 128), "float32"), ("B", (4, 128), "float32"), ("C", (4, 128), "float32")]
    body = """
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  C[i] = A[i] + B[i];
"""
    a, b = ramp(4, 128), 2 * ramp(4, 128)
    outputs = clean(image(body, buffers, grid=4, block=128), a, b)
    np.testing.assert_array_equal(outputs["C"], a + b)


def test_shared_reverse_is_clean() -> None:
    a = ramp(4, 64)
    np.testing.assert_array_equal(clean(reverse(), a)["C"], a[:, ::-1])


def test_shared_reverse_without_barrier_races() -> None:
    right = reverse()
    wrong = replace(right, cuda=right.cuda.replace("__syncthreads();", ";"))
    report = emulate(wrong, [ramp(4, 64)])
    race = only(report, "race")
    assert race.buffer == "tile" and race.unit == "byte" and race.index % 4 == 0
    assert {race.first, race.second} == {
        statement(wrong, "tile[threadIdx.x] ="),
        statement(wrong, "= tile[63"),
    }
    assert "no CTA barrier lies between" in race.detail
    assert str(race).startswith(f"race at byte {race.index} of tile in `line ")


@pytest.mark.parametrize("seed", range(5))
def test_races_do_not_depend_on_luck(seed: int) -> None:
    """A read that happens to come after the write it needs still races with it."""
    body = """
  __shared__ alignas(64) float cell[1];
  if (threadIdx.x == 0) cell[0] = A[0];
  if (threadIdx.x == 1) C[0] = cell[0];
"""
    wrong = image(body, [("A", (1,), "float32"), ("C", (1,), "float32")])
    race = only(emulate(wrong, [ramp(1)], seed=seed, orders=1), "race")
    assert {race.first, race.second} == {statement(wrong, "= A[0]"), statement(wrong, "C[0]")}


def test_write_after_read_needs_a_barrier() -> None:
    """The classic missing second barrier of a staging loop."""
    body = """
  __shared__ alignas(64) float stage[64];
  float sum = 0.0f;
  for (int k = 0; k < 2; ++k) {
    stage[threadIdx.x] = A[threadIdx.x] + k;
    __syncthreads();
    sum += stage[63 - threadIdx.x];
    // end
  }
  C[threadIdx.x] = sum;
"""
    wrong = image(body, PAIR)
    race = only(emulate(wrong, [ramp(64)]), "race")
    assert {race.first, race.second} == {
        statement(wrong, "stage[threadIdx.x] ="),
        statement(wrong, "sum += stage"),
    }
    right = replace(wrong, cuda=wrong.cuda.replace("// end", "__syncthreads();"))
    np.testing.assert_array_equal(clean(right, ramp(64))["C"], 2 * ramp(64)[::-1] + 1)


def test_three_readers_of_different_warps_are_all_remembered() -> None:
    """Every thread reads one cell; the write after it misses the barrier for all but itself."""
    body = """
  __shared__ alignas(64) float cell[1];
  if (threadIdx.x == 0) cell[0] = A[0];
  __syncthreads();
  C[threadIdx.x] = cell[0];
  if (threadIdx.x == WRITER) cell[0] = 1.0f;
"""
    buffers = [("A", (1,), "float32"), ("C", (96,), "float32")]
    for writer in (0, 33, 95):
        wrong = image(body, buffers, block=96, preamble=f"#define WRITER {writer}")
        race = only(emulate(wrong, [ramp(1)], orders=1), "race")
        pair = {statement(wrong, "C[threadIdx.x] = cell[0]"), statement(wrong, "= 1.0f")}
        assert {race.first, race.second} == pair


def test_neighbouring_elements_of_one_word_do_not_race() -> None:
    body = """
  __shared__ alignas(64) unsigned char bytes[64];
  bytes[threadIdx.x] = (unsigned char)A[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 16) ((unsigned*)bytes)[threadIdx.x] += 0x01010101u;
  __syncthreads();
  C[threadIdx.x] = bytes[63 - threadIdx.x];
"""
    a = np.arange(64, dtype="uint8")
    right = image(body, [("A", (64,), "uint8"), ("C", (64,), "uint8")])
    np.testing.assert_array_equal(clean(right, a)["C"], a[::-1] + 1)


def test_threads_of_one_cta_at_different_barriers() -> None:
    body = """
  if (threadIdx.x < 32) {
    __syncthreads();  // low
  } else {
    __syncthreads();  // high
  }
  C[threadIdx.x] = A[threadIdx.x];
"""
    wrong = image(body, PAIR)
    divergence = only(emulate(wrong, [ramp(64)]), "barrier-divergence")
    assert {divergence.first, divergence.second} == {
        statement(wrong, "// low"),
        statement(wrong, "// high"),
    }
    assert "different __syncthreads statements" in divergence.detail


def test_thread_that_skips_a_barrier() -> None:
    body = """
  C[threadIdx.x] = A[threadIdx.x];
  if (threadIdx.x < 63) __syncthreads();
"""
    wrong = image(body, PAIR)
    report = emulate(wrong, [ramp(64)])
    divergence = only(report, "barrier-divergence")
    assert divergence.first == statement(wrong, "__syncthreads")
    assert "waits at __syncthreads number 1, while thread 63" in divergence.detail
    assert "has finished" in divergence.detail
    assert not report.outputs


def test_barrier_in_a_loop_is_one_statement() -> None:
    """g++ may copy a barrier (unrolling, threading of jumps); that is no divergence."""
    body = """
  __shared__ alignas(64) float tile[64];
  float value = A[threadIdx.x];
  for (int step = 0; step < 3; ++step) {
    if (threadIdx.x % 2 == 0) value += 1.0f; else value += 2.0f;
    tile[threadIdx.x] = value;
    __syncthreads();
    value = tile[threadIdx.x ^ 1];
    __syncthreads();
  }
  C[threadIdx.x] = value;
"""
    assert clean(image(body, PAIR), ramp(64))["C"].shape == (64,)
