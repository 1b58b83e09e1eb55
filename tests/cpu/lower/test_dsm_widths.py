"""Vectorised loads and stores of peers' slabs, in every element type and width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from cpu.lower.support import checked, inputs_of, kernels_in
from cpu.macros import X
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin

BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
WIDTHS = (1, 2, 4, 8, 16)
ROW = 128


def pull(dtype: str, lanes: int) -> Any:
    """Each thread reads `lanes` elements of the next rank's slab at once."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, ROW), dtype), B: T.Buffer((4, ROW), dtype)):
        P = T.sblock_alloc_buffer((4, ROW), dtype, scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for e in range(ROW // 8 // lanes):
                    for v in T.vectorized(lanes):
                        with T.sblock("fill"):
                            vc = T.axis.spatial(4, c)
                            at = T.axis.spatial(ROW, (e * 8 + t) * lanes + v)
                            P[vc, at] = A[vc, at]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for e in range(ROW // 8 // lanes):
                    for v in T.vectorized(lanes):
                        with T.sblock("read"):
                            vz = T.axis.spatial(4, z)
                            at = T.axis.spatial(ROW, (e * 8 + t) * lanes + v)
                            B[vz, at] = P[(vz + 1) % 4, at]

    return func


def push(dtype: str, lanes: int) -> Any:
    """Each thread writes `lanes` elements of the next rank's slab at once."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, ROW), dtype), B: T.Buffer((4, ROW), dtype)):
        P = T.sblock_alloc_buffer((4, ROW), dtype, scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for e in range(ROW // 8 // lanes):
                    for v in T.vectorized(lanes):
                        with T.sblock("give"):
                            vc = T.axis.spatial(4, c)
                            at = T.axis.spatial(ROW, (e * 8 + t) * lanes + v)
                            P[(vc + 1) % 4, at] = A[vc, at]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for e in range(ROW // 8 // lanes):
                    for v in T.vectorized(lanes):
                        with T.sblock("take"):
                            vz = T.axis.spatial(4, z)
                            at = T.axis.spatial(ROW, (e * 8 + t) * lanes + v)
                            B[vz, at] = P[vz, at]

    return func


def combined(images: list[KernelImage]) -> KernelImage:
    """One image with the kernels of several, each with an output of its own."""
    first, *others = images
    text = first.cuda + "".join(kernels_in(each.cuda) for each in others)
    source, output = first.buffers
    outputs = [replace(output, name=f"B{i}") for i in range(len(images))]
    launches = [
        replace(each.launches[0], arguments=("A", f"B{i}")) for i, each in enumerate(images)
    ]
    return KernelImage("widths", text, (source, *outputs), tuple(launches))


@pytest.mark.parametrize("make", [pull, push])
@pytest.mark.parametrize("dtype", BYTES)
def test_every_width_uses_its_helper_compiles_and_moves_the_bits(dtype: str, make: Any) -> None:
    widths = [each for each in WIDTHS if each >= BYTES[dtype]]
    images = []
    for width in widths:
        func = make(dtype, width // BYTES[dtype])
        image = lower(func, name=f"{make.__name__}_{width}").image
        way = "load" if make is pull else "store"
        assert f"crossfuse_dsm_{way}_b{8 * width}(" in kernels_in(image.cuda)
        images.append(image)
    image = combined(images)
    cubin = compile_cubin(image.cuda)
    assert all(cubin.usage(each.symbol) for each in image.launches)
    inputs = inputs_of(image)
    report = emulate(image, inputs)
    assert report.ok, "\n".join(map(str, report.findings))
    wanted = np.roll(inputs["A"], -1 if make is pull else 1, axis=0)
    for name, value in report.outputs.items():
        assert value.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_vectors_are_values_after_the_load(dtype: str) -> None:
    lanes = 4

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 32), dtype), B: T.Buffer((4, 32), "float32")):
        P = T.sblock_alloc_buffer((4, 32), dtype, scope="shared.dsm")
        for c in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for v in T.vectorized(lanes):
                    with T.sblock("fill"):
                        vc, at = T.axis.spatial(4, c), T.axis.spatial(32, t * lanes + v)
                        P[vc, at] = A[vc, at]
        for z in T.parallel(4, annotations=X):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                for v in T.vectorized(lanes):
                    with T.sblock("read"):
                        vz, at = T.axis.spatial(4, z), T.axis.spatial(32, t * lanes + v)
                        B[vz, at] = T.Cast("float32", P[(vz + 1) % 4, at]) * T.float32(3)

    lowered = checked(func)
    assert f"crossfuse_dsm_load_b{8 * lanes * BYTES[dtype]}(" in kernels_in(lowered.image.cuda)
    compile_cubin(lowered.image.cuda)


def test_without_vectors_each_element_is_an_access() -> None:
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        lowered = checked(pull("float16", 8))
    assert "crossfuse_dsm_load_b16(" in kernels_in(lowered.image.cuda)
    assert "b128(" not in kernels_in(lowered.image.cuda)
