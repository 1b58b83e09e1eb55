"""Boxes that a warp stages by stmatrix, TMA stores of them, and the named barriers between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, STORES
from cpu.emulate.kernels import clean, image, only, ramp, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import CheckFailed
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, TensorMap

HELPERS = (
    BARRIERS
    + STORES
    + """
#include <cuda_fp16.h>
__forceinline__ __device__ void put(unsigned address, unsigned high, unsigned low) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               :: "r"(address), "r"(high), "r"(low) : "memory");
}
__forceinline__ __device__ void meet(unsigned id, unsigned threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__forceinline__ __device__ void pass_by(unsigned id, unsigned threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
"""
)

# A thread holds two elements of a row in the upper half of 16 rows, and two in the lower one. Only
# the first 16 lanes name a row.
BODY = """
  __shared__ alignas(128) uint16_t tile[16 * 8];
  int lane = threadIdx.x;
  const unsigned* rows = (const unsigned*)A + lane / 4 * 4 + lane % 4;
  unsigned row = lane < 16 ? AT(&tile[lane * 8]) : 0xfffffff0u;
  put(row, rows[0], rows[8 * 4]);
  fence_shared();
  __syncthreads();
  if (lane == 0) {
    store_box(&c_map, COLUMN, 0, AT(tile));
    commit();
    await_reads();
  }
"""
A = np.arange(16 * 8, dtype="uint16").reshape(16, 8).view("float16")


def boxes(body: str = BODY, column: int = 0) -> KernelImage:
    """One warp stores a box of 16 rows of 16 bytes, which no swizzle changes."""
    a = BufferSpec("A", (16, 8), "float16", False)
    c = BufferSpec("C", (16, 8), "float16", True)
    text = (
        f"{HELPERS}\n#define COLUMN {column}\n"
        'extern "C" __global__ void __launch_bounds__(32) '
        f"k(half* A, const __grid_constant__ CUtensorMap c_map) {{{body}}}\n"
    )
    map_ = TensorMap("c_map", "C", (8, 16), (16,), (8, 16), 0)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("A", "c_map"), (map_,))
    return KernelImage("k", text, (a, c), (launch,))


def test_two_matrices_are_rows_of_16_bytes() -> None:
    found = clean(boxes(), A)["C"]
    np.testing.assert_array_equal(found.view("uint16"), A.view("uint16"))


def test_a_row_of_the_second_matrix_that_is_not_named() -> None:
    wrong = boxes(BODY.replace("lane < 16 ?", "lane < 8 ?"))
    race = only(emulate(wrong, [A]), "async-race")
    assert race.index == 128
    assert "that nothing was stored to" in race.detail


def test_a_matrix_that_is_not_stored() -> None:
    """All bytes that the copy reads are checked, in both matrices."""
    wrong = boxes(BODY.replace(".x2", ".x1"))
    text = wrong.cuda.replace("m8n8.x2.shared.b16 [%0], {%1, %2}", "m8n8.x1.shared.b16 [%0], {%1}")
    wrong = replace(wrong, cuda=text.replace(', "r"(low)', ""))
    race = only(emulate(wrong, [A]), "async-race")
    assert race.first == statement(wrong, "store_box(")
    assert race.index == 128
    assert "that nothing was stored to" in race.detail


def test_a_copy_of_columns_beyond_the_box() -> None:
    """Eight columns further right lies nothing: what should be stored there is not."""
    report = emulate(boxes(column=8), [A])
    assert only(report, "unwritten-output").buffer == "C"


# The first two of three warps exchange what they hold; the third one has another barrier.
EXCHANGE = """
  __shared__ alignas(16) float cells[96];
  cells[threadIdx.x] = A[threadIdx.x];
  meet(1 + threadIdx.x / 64, threadIdx.x < 64 ? 64 : 32);
  C[threadIdx.x] = cells[FROM];
"""
VECTORS = [("A", (96,), "float32"), ("C", (96,), "float32")]


def exchange(source: str, body: str = EXCHANGE) -> KernelImage:
    preamble = f"{HELPERS}\n#define FROM {source}\n"
    return image(body, VECTORS, block=96, preamble=preamble)


def test_a_named_barrier_orders_those_who_meet() -> None:
    a = ramp(96)
    found = clean(exchange("(threadIdx.x < 64 ? 63 - threadIdx.x : 159 - threadIdx.x)"), a)["C"]
    np.testing.assert_array_equal(found, np.concatenate([a[63::-1], a[:63:-1]]))


@pytest.mark.parametrize(
    ("source", "body"),
    [
        ("95 - threadIdx.x", EXCHANGE),  # between warps of different barriers
        ("(threadIdx.x ^ 32) % 96", EXCHANGE.replace("meet(1 +", "// meet(1 +")),
    ],
    ids=["another barrier", "none"],
)
def test_a_named_barrier_orders_nobody_else(source: str, body: str) -> None:
    wrong = exchange(source, body)
    race = only(emulate(wrong, [ramp(96)]), "race")
    assert {race.first, race.second} == {
        statement(wrong, "cells[threadIdx.x] ="),
        statement(wrong, "= cells[FROM]"),
    }
    assert "no CTA barrier lies between" in race.detail


def test_named_barriers_one_after_another() -> None:
    """What the first barrier told one warp, the second one tells the next."""
    body = """
  __shared__ alignas(16) float cells[96];
  cells[threadIdx.x] = A[threadIdx.x];
  if (threadIdx.x < 64) meet(1, 64);
  if (threadIdx.x >= 32) meet(2, 64);
  C[threadIdx.x] = threadIdx.x < 64 ? A[threadIdx.x] : cells[threadIdx.x - 64];
"""
    a = ramp(96)
    found = clean(exchange("0", body), a)["C"]
    np.testing.assert_array_equal(found, np.concatenate([a[:64], a[:32]]))


def test_what_follows_a_named_barrier_is_not_ordered_by_it() -> None:
    body = EXCHANGE.replace("  C[", "  cells[threadIdx.x] += 1.0f;\n  C[")
    wrong = exchange("(threadIdx.x < 64 ? 63 - threadIdx.x : threadIdx.x)", body)
    race = only(emulate(wrong, [ramp(96)]), "race")
    assert statement(wrong, "+= 1.0f") in (race.first, race.second)


# The first warp tells the second one that it has stored, and goes on.
TOLD = """
  __shared__ alignas(16) float cells[96];
  if (threadIdx.x < 32) {
    cells[threadIdx.x] = A[threadIdx.x];
    pass_by(1, 64);
    LATER
    C[threadIdx.x] = 0;
  } else if (threadIdx.x < 64) {
    meet(1, 64);
    C[threadIdx.x] = cells[threadIdx.x - 32];
  } else {
    C[threadIdx.x] = 1;
  }
"""


def test_who_waits_sees_what_was_done_before_an_arrival() -> None:
    a = ramp(96)
    found = clean(exchange("0", TOLD.replace("LATER", "")), a)["C"]
    np.testing.assert_array_equal(found, np.concatenate([0 * a[:32], a[:32], 0 * a[:32] + 1]))


def test_who_waits_knows_nothing_of_what_comes_behind_an_arrival() -> None:
    wrong = exchange("0", TOLD.replace("LATER", "cells[threadIdx.x] = 7;"))
    race = only(emulate(wrong, [ramp(96)], orders=4), "race")
    assert statement(wrong, "cells[threadIdx.x] = 7;") in {race.first, race.second}


def test_an_arrival_that_never_comes() -> None:
    wrong = exchange("0", TOLD.replace("pass_by(1, 64);", "").replace("LATER", ""))
    (stuck,) = {each.detail for each in emulate(wrong, [ramp(96)]).findings}
    assert "waits at a named barrier" in stuck


def test_a_box_of_one_matrix_of_several() -> None:
    """Maps of four dimensions: columns, rows, and the place of a matrix."""
    text = (
        boxes()
        .cuda.replace("tensor.2d", "tensor.4d")
        .replace("{%1, %2}], [%3]", "{%1, %2, %3, %4}], [%5]")
    )
    text = text.replace('"r"(y), "r"(from)', '"r"(y), "r"(1), "r"(2), "r"(from)')
    a = BufferSpec("A", (16, 8), "float16", False)
    c = BufferSpec("C", (3, 2, 16, 8), "float16", True)
    map_ = TensorMap("c_map", "C", (8, 16, 2, 3), (16, 256, 512), (8, 16, 1, 1), 0)
    launch = replace(boxes().launches[0], tensor_maps=(map_,))
    report = emulate(KernelImage("k", text, (a, c), (launch,)), [A])
    found = report.outputs["C"].view("uint16")
    np.testing.assert_array_equal(found[2, 1], A.view("uint16"))
    assert only(report, "unwritten-output").buffer == "C"
    wrong = replace(
        launch, tensor_maps=(replace(map_, extents=(8, 16, 6), strides=(16, 256), box=(8, 16, 1)),)
    )
    misuse = only(emulate(KernelImage("k", text, (a, c), (wrong,)), [A]), "tensor-map")
    assert "a copy has not as many coordinates as its map" in misuse.detail


def test_a_box_of_several_matrices() -> None:
    """Rows of one lie before those of the next; of matrices outside nothing is stored."""
    text = (
        boxes()
        .cuda.replace("tensor.2d", "tensor.3d")
        .replace("{%1, %2}], [%3]", "{%1, %2, %3}], [%4]")
        .replace('"r"(y), "r"(from)', '"r"(y), "r"(MATRIX), "r"(from)')
    )
    a = BufferSpec("A", (16, 8), "float16", False)
    c = BufferSpec("C", (3, 8, 8), "float16", True)
    map_ = TensorMap("c_map", "C", (8, 8, 3), (16, 128), (8, 8, 2), 0)
    launch = replace(boxes().launches[0], tensor_maps=(map_,))
    for first, stored in ((0, slice(0, 2)), (2, slice(2, 3))):
        given = KernelImage("k", f"#define MATRIX {first}\n{text}", (a, c), (launch,))
        report = emulate(given, [A])
        found, due = (each.view("uint16") for each in (report.outputs["C"], A.reshape(2, 8, 8)))
        np.testing.assert_array_equal(found[stored], due[: stored.stop - stored.start])
        assert only(report, "unwritten-output").buffer == "C"
    wrong = replace(launch, tensor_maps=(replace(map_, box=(8, 8, 2, 2)),))
    with pytest.raises(CheckFailed) as caught:
        emulate(KernelImage("k", text, (a, c), (wrong,)), [A])
    assert str(caught.value) == (
        "emulate-image: k: found tensor map c_map with boxes (8, 8, 2, 2); limit: boxes of "
        "matrices of one dimension, an extent for each. Instead: correct the lowering that made "
        "the image."
    )
