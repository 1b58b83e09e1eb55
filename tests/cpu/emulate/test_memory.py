"""Bounds, initialisation, alignment, and races in global memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.kernels import clean, image, only, ramp, reverse, statement
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import Launch

PAIR = [("A", (64,), "float32"), ("C", (64,), "float32")]
COPY = """
  C[threadIdx.x] = A[threadIdx.x + SHIFT];
"""


def test_global_read_out_of_bounds() -> None:
    wrong = image(COPY, PAIR, preamble="#define SHIFT 1")
    report = emulate(wrong, [ramp(64)])
    finding = only(report, "out-of-bounds")
    assert (finding.buffer, finding.index, finding.unit) == ("A", 64, "element")
    assert finding.first == statement(wrong, "C[threadIdx.x] = A")
    assert finding.thread == 63
    assert finding.detail == "reads 4 bytes at byte 256 of a buffer of 256"
    np.testing.assert_array_equal(report.outputs["C"][:63], ramp(64)[1:])


@pytest.mark.parametrize("shift", [-1, 5_000_000, -300_000_000, 1 << 31])
def test_wild_global_reads_are_survived(shift: int) -> None:
    wrong = image(COPY, PAIR, preamble=f"#define SHIFT ({shift}ll)")
    report = emulate(wrong, [ramp(64)])
    finding = only(report, "out-of-bounds")
    assert finding.first == statement(wrong, "C[threadIdx.x] = A")
    assert report.outputs["C"].shape == (64,)


def test_global_write_out_of_bounds() -> None:
    body = """
  C[threadIdx.x] = A[threadIdx.x];
  if (threadIdx.x == 0) C[-2] = 1.0f;
"""
    wrong = image(body, PAIR)
    report = emulate(wrong, [ramp(64)])
    finding = only(report, "out-of-bounds")
    assert (finding.buffer, finding.index) == ("C", -2)
    assert finding.first == statement(wrong, "C[-2]")
    np.testing.assert_array_equal(report.outputs["C"], ramp(64))


def test_null_pointer_ends_the_run_with_a_finding() -> None:
    body = """
  float* nowhere = (float*)(A[0] == 0.0f ? 0ll : 1ll);
  C[threadIdx.x] = *nowhere;
"""
    wrong = image(body, PAIR)
    report = emulate(wrong, [ramp(64)])
    assert only(report, "out-of-bounds").first == statement(wrong, "*nowhere;")
    assert not report.outputs


def test_static_shared_out_of_bounds() -> None:
    body = """
  __shared__ alignas(64) float tile[64];
  __shared__ alignas(64) float other[64];
  other[threadIdx.x] = 0.0f;
  tile[threadIdx.x + 1] = A[threadIdx.x];
  __syncthreads();
  C[threadIdx.x] = tile[threadIdx.x == 0 ? 1 : threadIdx.x] + other[threadIdx.x];
"""
    wrong = image(body, PAIR)
    finding = only(emulate(wrong, [ramp(64)]), "out-of-bounds")
    assert (finding.buffer, finding.index, finding.unit) == ("tile", 256, "byte")
    assert finding.first == statement(wrong, "tile[threadIdx.x + 1]")


def test_dynamic_shared_out_of_bounds() -> None:
    body = """
  extern __shared__ __align__(64) unsigned char pool[];
  ((float*)pool)[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  C[threadIdx.x] = ((float*)pool)[63 - threadIdx.x];
"""
    clean(image(body, PAIR, shared=256), ramp(64))
    wrong = image(body, PAIR, shared=252)
    report = emulate(wrong, [ramp(64)])
    found = {(f.buffer, f.index, f.first) for f in report.findings if f.kind == "out-of-bounds"}
    assert found == {
        ("shared memory", 252, statement(wrong, "[threadIdx.x] = A")),
        ("shared memory", 252, statement(wrong, "= ((float*)pool)")),
    }


def test_uninitialised_shared_read() -> None:
    body = """
  __shared__ alignas(64) float tile[64];
  if (threadIdx.x != 5) tile[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  C[threadIdx.x] = tile[63 - threadIdx.x];
"""
    wrong = image(body, PAIR)
    report = emulate(wrong, [ramp(64)])
    finding = only(report, "uninitialised-read")
    assert (finding.buffer, finding.index, finding.unit) == ("tile", 20, "byte")
    assert finding.first == statement(wrong, "= tile[63")
    assert np.isnan(report.outputs["C"][58])


def test_shared_memory_does_not_outlive_its_cta() -> None:
    """The second CTA must not find what the first one left."""
    body = """
  __shared__ alignas(64) float tile[64];
  if (blockIdx.x == 0) tile[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  C[blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x];
"""
    wrong = image(body, [("A", (64,), "float32"), ("C", (2, 64), "float32")], grid=2)
    finding = only(emulate(wrong, [ramp(64)]), "uninitialised-read")
    assert finding.first == statement(wrong, "= tile[threadIdx.x]") and finding.cta == 1


def test_reading_an_output_before_writing_it() -> None:
    wrong = image("\n  C[threadIdx.x] += A[threadIdx.x];\n", PAIR)
    finding = only(emulate(wrong, [ramp(64)]), "uninitialised-read")
    assert finding.buffer == "C" and finding.first == statement(wrong, "C[threadIdx.x] +=")


def test_unwritten_output() -> None:
    wrong = image("\n  if (threadIdx.x % 3) C[threadIdx.x] = A[threadIdx.x];\n", PAIR)
    report = emulate(wrong, [ramp(64)])
    finding = only(report, "unwritten-output")
    assert (finding.buffer, finding.index, finding.first) == ("C", 0, "")
    assert finding.detail == "22 of 64 elements were never written"
    assert str(finding) == (
        "unwritten-output at element 0 of C: 22 of 64 elements were never written."
    )


def test_write_to_an_input() -> None:
    wrong = image("\n  C[threadIdx.x] = A[threadIdx.x]; A[threadIdx.x] = 0.0f;\n", PAIR)
    finding = only(emulate(wrong, [ramp(64)]), "write-to-input")
    assert finding.buffer == "A" and finding.detail == "the buffer is not an output"


def test_index_beyond_an_array_of_the_thread() -> None:
    """As of registers: what lies there is nobody's, and often zero."""
    body = """
  float own[4] = {A[threadIdx.x], 1.0f, 2.0f, 3.0f};
  C[threadIdx.x] = own[threadIdx.x < 63 ? 0 : 5];
"""
    wrong = image(body, PAIR)
    finding = only(emulate(wrong, [ramp(64)]), "out-of-bounds")
    assert finding.first == statement(wrong, "C[threadIdx.x] =") and finding.buffer == ""
    assert finding.detail == "index 5 lies beyond a thread's own array"


def test_misaligned_vector_access() -> None:
    body = """
  if (threadIdx.x < 16) *(float4*)(C + threadIdx.x * 4) = *(float4*)(A + threadIdx.x * 4 + 1);
"""
    wrong = image(body, [("A", (65,), "float32"), ("C", (64,), "float32")])
    report = emulate(wrong, [ramp(65)])
    finding = only(report, "misaligned")
    assert (finding.buffer, finding.index % 4) == ("A", 1)
    assert finding.first == statement(wrong, "*(float4*)")
    assert finding.detail == "the access needs an alignment of 16 bytes"


@pytest.mark.parametrize(
    ("shift", "text", "bytes_"),
    [
        (1, 'asm("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"', 16),
        (2, 'asm("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"', 16),
        (1, 'asm("st.global.v2.f32 [%0], {%1, %2};"', 8),
    ],
)
def test_misaligned_instruction(shift: int, text: str, bytes_: int) -> None:
    """Vectors of inline PTX need the alignment of those of C++."""
    from_a = ': "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "l"(A + at)'
    to_c = ': : "l"(C + at), "f"(x), "f"(y)'
    body = f"""
  int at = threadIdx.x * 4 + {shift};
  float x = 0.0f, y = 0.0f, z = 0.0f, w = 0.0f;
  {text} {from_a if "ld" in text else to_c} : "memory");
  C[threadIdx.x] = x + y + z + w;
"""
    shapes = [("A", (261,), "float32"), ("C", (261,), "float32")]
    wrong = image(body, shapes, block=64)
    found = [each for each in emulate(wrong, [ramp(261)]).findings if each.kind == "misaligned"]
    assert {each.detail for each in found} == {f"the access needs an alignment of {bytes_} bytes"}
    right = replace(wrong, cuda=wrong.cuda.replace(f"* 4 + {shift}", "* 4"))
    assert all(each.kind != "misaligned" for each in emulate(right, [ramp(261)]).findings)


def test_misaligned_shared_access() -> None:
    """The base has the declared alignment and no better: 16-byte accesses need 16."""
    body = """
  extern __shared__ __align__(8) unsigned char pool[];
  ((float4*)pool)[threadIdx.x] = *(float4*)(A + threadIdx.x * 4);
  __syncthreads();
  *(float4*)(C + threadIdx.x * 4) = ((float4*)pool)[15 - threadIdx.x];
"""
    wrong = image(body, PAIR, block=16, shared=256)
    misaligned = {f.first for f in emulate(wrong, [ramp(64)]).findings if f.kind == "misaligned"}
    assert statement(wrong, "((float4*)pool)[threadIdx.x]") in misaligned
    clean(replace(wrong, cuda=wrong.cuda.replace("__align__(8)", "__align__(16)")), ramp(64))


def test_clusters_that_write_one_element_race() -> None:
    """Also with the same value: the hardware decides whose write stays."""
    body = """
  C[(blockIdx.x * 32 + threadIdx.x) % 96] = 1.0f;
"""
    wrong = image(body, [("C", (96,), "float32")], grid=4, block=32)
    race = only(emulate(wrong, []), "race")
    assert race.buffer == "C" and race.unit == "element" and race.index < 32
    assert race.first == race.second == statement(wrong, "C[(blockIdx")
    assert "clusters of one launch are never ordered" in race.detail


def test_read_of_what_another_cluster_writes_races() -> None:
    body = """
  C[blockIdx.x * 32 + threadIdx.x] = A[threadIdx.x];
  D[blockIdx.x * 32 + threadIdx.x] = C[(blockIdx.x * 32 + threadIdx.x + 1) % 64];
"""
    buffers = [("A", (32,), "float32"), ("C", (64,), "float32"), ("D", (64,), "float32")]
    wrong = image(body, buffers, grid=2, block=32)
    wrong = replace(wrong, buffers=tuple(replace(b, output=b.name != "A") for b in wrong.buffers))
    race = only(emulate(wrong, [ramp(32)], seed=1), "race")
    assert {race.first, race.second} == {statement(wrong, "= A["), statement(wrong, "= C[(")}


def test_global_exchange_within_a_cta_needs_a_barrier() -> None:
    body = """
  D[threadIdx.x] = A[threadIdx.x];
  __syncthreads();
  C[threadIdx.x] = D[63 - threadIdx.x];
"""
    buffers = [*PAIR, ("D", (64,), "float32")]
    right = image(body, buffers)
    right = replace(right, buffers=tuple(replace(b, output=b.name != "A") for b in right.buffers))
    np.testing.assert_array_equal(clean(right, ramp(64))["C"], ramp(64)[::-1])
    wrong = replace(right, cuda=right.cuda.replace("__syncthreads();", ";"))
    assert only(emulate(wrong, [ramp(64)]), "race").buffer == "D"


def test_a_later_launch_sees_what_an_earlier_one_wrote() -> None:
    first = reverse()
    launches = (
        Launch("k", (4, 1, 1), (64, 1, 1), (1, 1, 1), 0, ("A", "T")),
        Launch("k", (4, 1, 1), (64, 1, 1), (1, 1, 1), 0, ("T", "C")),
    )
    scratch = replace(first.buffers[1], name="T")
    twice = replace(first, buffers=(*first.buffers, scratch), launches=launches)
    report = emulate(twice, [ramp(4, 64)])
    report.raise_if_wrong()
    assert report.launches == 2
    np.testing.assert_array_equal(report.outputs["C"], ramp(4, 64))


def test_atomics_do_not_race_with_each_other() -> None:
    body = """
  if (blockIdx.x == 0 && threadIdx.x == 0) FIRST
  atomicAdd(&C[0], 1);
"""
    wrong = image(body, [("C", (1,), "int32")], grid=2, preamble="#define FIRST ;")
    assert only(emulate(wrong, []), "uninitialised-read").buffer == "C"
    wrong = image(body, [("C", (1,), "int32")], grid=2, preamble="#define FIRST C[0] = 0;")
    race = only(emulate(wrong, []), "race")
    assert {race.first, race.second} == {statement(wrong, "FIRST"), statement(wrong, "atomicAdd")}


def test_atomics_after_an_initialising_launch() -> None:
    two = """
extern "C" __global__ void clear(int* C) { C[0] = 0; }
extern "C" __global__ void count(int* C) { atomicAdd(C, 1); }
"""
    img = image("", [("C", (1,), "int32")])
    launches = (
        Launch("clear", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, ("C",)),
        Launch("count", (3, 1, 1), (64, 1, 1), (1, 1, 1), 0, ("C",)),
    )
    assert clean(replace(img, cuda=two, launches=launches))["C"][0] == 192
