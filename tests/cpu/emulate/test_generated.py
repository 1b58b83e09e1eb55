"""Text that TVM generates today for stock schedules, emulated and compared with numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import ir as I
from tvm.script import tirx as T

from cpu.emulate.kernels import clean, only
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.cuda.arguments import numpy_dtype
from crossfuse.hardware import tvm_target
from crossfuse.lower.image import BufferSpec, KernelImage, Launch

M, N, K = 64, 64, 256


@I.ir_module
class Matmul:
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((64, 256), "float16"),
        B: T.Buffer((256, 64), "float16"),
        C: T.Buffer((64, 64), "float32"),
    ):
        for i, j, k in T.grid(64, 64, 256):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj])


@I.ir_module
class Softmax:
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((16, 512), "float16"), C: T.Buffer((16, 512), "float16")):
        top = T.sblock_alloc_buffer((16,), "float32", scope="shared")
        total = T.sblock_alloc_buffer((16,), "float32", scope="shared")
        for i, k in T.grid(16, 512):
            with T.sblock("top"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    top[vi] = T.min_value("float32")
                top[vi] = T.max(top[vi], T.Cast("float32", A[vi, vk]))
        for i, k in T.grid(16, 512):
            with T.sblock("total"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    total[vi] = T.float32(0)
                total[vi] = total[vi] + T.exp(T.Cast("float32", A[vi, vk]) - top[vi])
        for i, k in T.grid(16, 512):
            with T.sblock("C"):
                vi, vk = T.axis.remap("SS", [i, k])
                C[vi, vk] = T.Cast(
                    "float16", T.exp(T.Cast("float32", A[vi, vk]) - top[vi]) / total[vi]
                )


def generate(module: Any, launch: tuple[int, ...], dynamic: int = 0) -> KernelImage:
    """Image of a scheduled module of one kernel; `launch` is (grid x, y, block x, y, cluster x)."""
    target = tvm_target("nvidia-h100")
    text = tvm.compile(module, target=target).mod.imports[0].inspect_source()
    symbol = re.search(r"__global__[^(]*\([^)]*\) (\w+)\(", text)
    assert symbol is not None
    buffers = tuple(
        BufferSpec(
            parameter.name,
            tuple(int(extent) for extent in parameter.ty.shape),
            str(parameter.ty.dtype),
            parameter.name == "C",
        )
        for parameter in module["main"].params
    )
    gx, gy, bx, by, cluster = launch
    names = tuple(buffer.name for buffer in buffers)
    shape = Launch(symbol[1], (gx, gy, 1), (bx, by, 1), (cluster, 1, 1), dynamic, names)
    return KernelImage("main", text, buffers, (shape,))


def tiled_matmul() -> Any:
    """32 x 32 tiles on 16 x 16 threads, both operands staged by vector loads."""
    sch = s_tir.Schedule(Matmul)
    block = sch.get_sblock("C")
    i, j, k = sch.get_loops(block)
    io, iy, ir = sch.split(i, [None, 16, 2])
    jo, jx, jr = sch.split(j, [None, 16, 2])
    ko, ki = sch.split(k, [None, 32])
    sch.reorder(io, jo, iy, jx, ko, ki, ir, jr)
    for loop, tag in (
        (io, "blockIdx.y"),
        (jo, "blockIdx.x"),
        (iy, "threadIdx.y"),
        (jx, "threadIdx.x"),
    ):
        sch.bind(loop, tag)
    sch.reverse_compute_at(sch.cache_write(block, 0, "local"), jx)
    for operand, scope in enumerate(("shared.dyn", "shared")):
        stage = sch.cache_read(block, operand, scope)
        sch.compute_at(stage, ko)
        fused = sch.fuse(*sch.get_loops(stage)[-2:])
        _, y, x, vector = sch.split(fused, [None, 16, 16, 2])
        sch.bind(y, "threadIdx.y")
        sch.bind(x, "threadIdx.x")
        sch.vectorize(vector)
    sch.decompose_reduction(block, ko)
    return sch.mod


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(M, K)).astype("float16"), rng.normal(size=(K, N)).astype("float16")


def test_matmul() -> None:
    a, b = operands()
    img = generate(tiled_matmul(), (2, 2, 16, 16, 1), dynamic=32 * 32 * 2)
    report = emulate(img, [a, b])
    report.raise_if_wrong()
    np.testing.assert_allclose(report.outputs["C"], a.astype("f8") @ b.astype("f8"), atol=1e-4)


@pytest.mark.parametrize(
    ("index", "racing"),
    [(0, {"A_shared_dyn_ptr", "shared memory"}), (1, set()), (2, {"B_shared_ptr"})],
)
def test_matmul_without_one_of_its_barriers(index: int, racing: set[str]) -> None:
    """TVM puts three: before the first stage, between the stages (not needed), and after them."""
    img = generate(tiled_matmul(), (2, 2, 16, 16, 1), dynamic=32 * 32 * 2)
    parts = img.cuda.split("__syncthreads()")
    assert len(parts) == 4
    kept = (
        "__syncthreads()".join(parts[: index + 1])
        + "(void)0"
        + "__syncthreads()".join(parts[index + 1 :])
    )
    report = emulate(replace(img, cuda=kept), operands())
    races = {finding.buffer for finding in report.findings if finding.kind == "race"}
    assert races <= racing and bool(races) == bool(racing) == (not report.ok)


def test_matmul_with_too_small_a_grid() -> None:
    img = generate(tiled_matmul(), (2, 1, 16, 16, 1), dynamic=32 * 32 * 2)
    finding = only(emulate(img, operands()), "unwritten-output")
    assert (finding.buffer, finding.index) == ("C", 2048)
    assert finding.detail == "2048 of 4096 elements were never written"


def test_softmax_with_warp_shuffles() -> None:
    sch = s_tir.Schedule(Softmax)
    row, column = sch.get_loops(sch.get_sblock("C"))
    sch.bind(row, "blockIdx.x")
    sch.bind(sch.split(column, [None, 128])[1], "threadIdx.x")
    for name in ("total", "top"):
        sch.compute_at(sch.get_sblock(name), row)
        sch.bind(sch.split(sch.get_loops(sch.get_sblock(name))[-1], [None, 128])[1], "threadIdx.x")
    img = generate(sch.mod, (16, 1, 128, 1, 1))
    assert "__shfl_down_sync" in img.cuda and "__activemask" in img.cuda
    a = np.random.default_rng(0).normal(size=(16, 512)).astype("float16")
    exponentials = np.exp(a.astype("float64"))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(clean(img, a)["C"].astype("f8"), expected, rtol=2e-3, atol=1e-7)


def elementwise(dtype: str, out: str, function: Callable[[Any], Any], lanes: int) -> KernelImage:
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(A: T.Buffer((2048,), dtype), C: T.Buffer((2048,), out)):
            for i in T.serial(2048):
                with T.sblock("C"):
                    vi = T.axis.remap("S", [i])
                    C[vi] = function(A[vi])

    sch = s_tir.Schedule(Module)
    (loop,) = sch.get_loops(sch.get_sblock("C"))
    outer, thread, vector = sch.split(loop, [None, 64, lanes])
    sch.bind(outer, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(vector)
    return generate(sch.mod, (2048 // 64 // lanes, 1, 64, 1, 1))


@pytest.mark.parametrize(
    ("dtype", "out", "lanes"),
    [
        ("float16", "float16", 8),
        ("float16", "float32", 4),
        ("bfloat16", "bfloat16", 4),
        ("bfloat16", "bfloat16", 8),
        ("float8_e4m3fn", "float32", 4),
        ("float8_e5m2", "float32", 1),
        ("float32", "bfloat16", 4),
        ("float32", "float16", 2),
        ("int32", "int32", 4),
        ("int8", "float32", 4),
    ],
)
def test_vectors_of_every_dtype(dtype: str, out: str, lanes: int) -> None:
    img = elementwise(dtype, out, lambda x: T.Cast(out, x) + T.Cast(out, x), lanes)
    a = (np.arange(2048) % 61 - 30).astype("float32").astype(numpy_dtype(dtype))
    expected = (2 * a.astype("float32")).astype(numpy_dtype(out))
    np.testing.assert_array_equal(clean(img, a)["C"], expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "erf"])
def test_activations(name: str, dtype: str) -> None:
    img = elementwise(dtype, dtype, getattr(T, name), 1)
    a = np.linspace(-4, 4, 2048).astype(numpy_dtype(dtype))
    x = a.astype("float64")
    expected = {
        "tanh": np.tanh(x),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "erf": np.vectorize(math.erf)(x),
    }[name]
    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    np.testing.assert_allclose(clean(img, a)["C"].astype("f8"), expected, rtol=tolerance, atol=1e-6)
