"""Copies by TMA of what CTAs of other clusters have written in the same launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cpu.emulate.copies import BARRIERS, LOADS, STORES
from cpu.emulate.kernels import clean, ramp, statement
from cpu.emulate.test_whole_grid import HELPERS as FLAGS
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, TensorMap

HELPERS = (
    FLAGS
    + BARRIERS
    + LOADS
    + STORES
    + """
__forceinline__ __device__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__forceinline__ __device__ void put(unsigned address, unsigned bits) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(address), "r"(bits));
}
__forceinline__ __device__ void get(float& x, float& y, unsigned address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address));
}
__forceinline__ __device__ void await_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""
)

# Every CTA of one warp stores a row, and loads all rows once their flags are raised.
BODY = """
  __shared__ alignas(128) float tile[32];
  __shared__ alignas(128) float rows[8 * 32];
  __shared__ alignas(16) uint64_t bar[1];
  __shared__ alignas(16) unsigned base[1];
  int lane = threadIdx.x;
  if (lane == 0) {
    init(AT(bar));
    base[0] = load_flag(&flags[blockIdx.x]);
  }
  put(AT(&tile[lane % 8 * 4]), __float_as_uint(A[blockIdx.x * 32 + lane] + 1.0f));
  fence_shared();
  __syncthreads();
  if (lane == 0) {
    store_box(&row_map, 0, blockIdx.x, AT(tile));
    commit();
    await_stores();
    raise_flag(&flags[blockIdx.x]);
  }
  if (lane < gridDim.x) {
    wait_flag(&flags[lane], base[0] + 1);
    fence_async();  // after the acquire
  }
  __syncthreads();
  if (lane == 0) {
    expect(AT(bar), 1024);
    load_box(AT(rows), &all_map, 0, START, AT(bar));
  }
  wait(AT(bar), 0);
  float x[2] = {0.0f, 0.0f}, each[2];
  for (int row = 0; row < 8; ++row) {
    get(each[0], each[1], AT(&rows[row * 32 + lane % 16 * 2]));
    x[0] += (row + 1) * each[0];
    x[1] += (row + 1) * each[1];
  }
  if (lane < 16) C[blockIdx.x * 32 + lane * 2] = x[0];
  if (lane < 16) C[blockIdx.x * 32 + lane * 2 + 1] = x[1];
"""
STORE = """    store_box(&row_map, 0, blockIdx.x, AT(tile));
    commit();
    await_stores();
"""
GENERIC = (
    "  fence_shared();\n  workspace[blockIdx.x * 32 + lane] = A[blockIdx.x * 32 + lane] + 1.0f;"
)
A = ramp(8, 32)


def copies(body: str = BODY, *, start: int = 0, cluster: int = 2) -> KernelImage:
    """Eight CTAs; the load of all rows starts at row `start`."""
    shape = (8, 32)
    a, c = BufferSpec("A", shape, "float32", False), BufferSpec("C", shape, "float32", True)
    workspace = BufferSpec("workspace", shape, "float32", True)
    flags = BufferSpec("flags", (8,), "uint32", True)
    parameters = (
        "float* A, float* C, float* workspace, uint32_t* flags, "
        "const __grid_constant__ CUtensorMap row_map, const __grid_constant__ CUtensorMap all_map"
    )
    text = (
        f"{HELPERS}\n#define START {start}\n"
        f'extern "C" __global__ void __launch_bounds__(32) k({parameters}) {{{body}}}\n'
    )
    maps = tuple(
        TensorMap(name, "workspace", (32, 8), (128,), box, 0)
        for name, box in (("row_map", (32, 1)), ("all_map", (32, 8)))
    )
    names = ("A", "C", "workspace", "flags", "row_map", "all_map")
    launch = Launch("k", (8, 1, 1), (32, 1, 1), (cluster, 1, 1), 0, names, maps, cooperative=True)
    return KernelImage("k", text, (a, c), (launch,), (workspace,), (flags,))


def generic(fence_of_writer: bool, fence_of_reader: bool) -> KernelImage:
    """Rows written by ordinary stores, with proxy fences on one side or the other."""
    fence = "  fence_async();\n" if fence_of_writer else ""
    body = BODY.replace("  fence_shared();", f"{GENERIC}\n{fence}").replace(STORE, "")
    if not fence_of_reader:
        body = body.replace("    fence_async();  // after the acquire\n", "")
    return copies(body)


def dropped(statement: str, by: str = "") -> KernelImage:
    """The right kernel without one statement, or with another in its place."""
    assert BODY.count(statement) == 1
    return copies(BODY.replace(statement, by))


def overwritten(before: str, after: str) -> KernelImage:
    """Rows are set to zero once all CTAs have said, in a second step, that they may be."""
    step = """  __syncthreads();
  if (lane == 0) raise_flag(&flags[blockIdx.x]);
  if (lane < gridDim.x) wait_flag(&flags[lane], base[0] + 2);
  __syncthreads();
  workspace[blockIdx.x * 32 + lane] = 0.0f;
"""
    return dropped("  wait(AT(bar), 0);\n", before + step + after)


def expected(a: np.ndarray, start: int = 0) -> np.ndarray:
    rows = np.zeros_like(a)
    rows[: 8 - start] = (a + 1)[start:]
    return np.tile((rows * np.arange(1, 9, dtype="float32")[:, None]).sum(axis=0), (8, 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cluster", [1, 2])
def test_copies_between_clusters_are_clean(seed: int, cluster: int) -> None:
    report = emulate(copies(cluster=cluster), [A], seed=seed, orders=3)
    report.raise_if_wrong()
    np.testing.assert_array_equal(report.outputs["C"], expected(A))


def test_box_that_reaches_beyond_the_tensor() -> None:
    np.testing.assert_array_equal(clean(copies(start=3), A)["C"], expected(A, 3))


def test_rows_overwritten_after_their_loads_are_clean() -> None:
    right = overwritten("  wait(AT(bar), 0);\n", "")
    np.testing.assert_array_equal(clean(right, A)["C"], expected(A))


@pytest.mark.parametrize("writer,reader", [(True, False), (False, True), (True, True)])
def test_ordinary_stores_with_a_proxy_fence_are_clean(writer: bool, reader: bool) -> None:
    np.testing.assert_array_equal(clean(generic(writer, reader), A)["C"], expected(A))


def test_proxy_fence_of_global_memory_is_enough() -> None:
    text = copies().cuda.replace("fence.proxy.async;", "fence.proxy.async.global;")
    assert text != copies().cuda
    np.testing.assert_array_equal(clean(replace(copies(), cuda=text), A)["C"], expected(A))


LOAD, ROW = "load_box(", "store_box("
Fault = tuple[Callable[[], KernelImage], str, tuple[str, ...], str]
FAULTS: dict[str, Fault] = {
    "only the reads of a store waited for": (
        lambda: dropped("await_stores();", "await_reads();"),
        "race",
        (ROW, LOAD),
        "the copy is not waited for",
    ),
    "a store not waited for": (
        lambda: dropped("    await_stores();\n"),
        "race",
        (ROW, LOAD),
        "the copy is not waited for",
    ),
    "no proxy fence after the acquire": (
        lambda: dropped("    fence_async();  // after the acquire\n"),
        "async-race",
        (ROW, LOAD),
        "no fence.proxy.async lies between the acquire and this copy",
    ),
    "a proxy fence of shared memory only": (
        lambda: dropped("fence_async();  // after", "fence_shared();  // after"),
        "async-race",
        (ROW, LOAD),
        "no fence.proxy.async lies between the acquire and this copy",
    ),
    "a proxy fence before the acquire": (
        lambda: copies(
            BODY.replace("    fence_async();  // after the acquire\n", "").replace(
                "    wait_flag(", "    fence_async();\n    wait_flag("
            )
        ),
        "async-race",
        (ROW, LOAD),
        "no fence.proxy.async lies between the acquire and this copy",
    ),
    "ordinary stores without any proxy fence": (
        lambda: generic(False, False),
        "async-race",
        ("workspace[blockIdx.x", LOAD),
        "no fence.proxy.async lies between that store and this copy",
    ),
    "a load that waits for no flag": (
        lambda: dropped("    wait_flag(&flags[lane], base[0] + 1);\n"),
        "race",
        (ROW, LOAD),
        "no release and acquire of a flag follow",
    ),
    "a row that nobody writes": (
        lambda: dropped("    store_box(", "    if (blockIdx.x != 5) store_box("),
        "uninitialised-read",
        (LOAD,),
        "before anything wrote it",
    ),
    "a row overwritten while it may be loaded": (
        lambda: overwritten("", "  wait(AT(bar), 0);\n"),
        "race",
        (LOAD, "= 0.0f;"),
        "nothing that follows the end of the copy lies between",
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_copy_is_caught(name: str, seed: int) -> None:
    make, kind, fragments, detail = FAULTS[name]
    wrong = make()
    report = emulate(wrong, [A], seed=seed, orders=1)
    pair = {statement(wrong, fragment) for fragment in fragments}
    found = [f for f in report.findings if f.kind == kind and {f.first, f.second} - {""} == pair]
    assert any(detail in each.detail for each in found), [str(each) for each in report.findings]


def test_copies_between_clusters_of_an_ordinary_launch() -> None:
    """Loads count as reads there as well, and nothing orders its clusters."""
    wrong = dropped("    wait_flag(&flags[lane], base[0] + 1);\n")
    wrong = replace(
        wrong, launches=(replace(wrong.launches[0], cooperative=False, cluster=(1, 1, 1)),)
    )
    report = emulate(wrong, [A], orders=1)
    found = {each.kind: each for each in report.findings}
    assert found["uninitialised-read"].first == statement(wrong, LOAD)
    assert "clusters of one launch are never ordered" in found["race"].detail


def test_a_late_store_is_seen_late() -> None:
    """Whoever waits for the reads of a store only may load what was there before."""
    wrong = dropped("await_stores();", "await_reads();")
    results = [emulate(wrong, [A], seed=seed, orders=1).outputs["C"] for seed in range(4)]
    assert any(not np.array_equal(each, expected(A)) for each in results)
