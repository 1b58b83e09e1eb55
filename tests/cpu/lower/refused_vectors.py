"""Schedules whose vectors the lowering refuses."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from cpu.lower.kernels import temporal
from cpu.macros import X
from crossfuse import _tvm as ir


@T.prim_func(s_tir=True)
def gathered_vector(A: T.Buffer((4, 8, 3), "float16"), B: T.Buffer((4, 8), "float16")):
    for c in T.parallel(4, annotations=X):
        for e in T.vectorized(8):
            with T.sblock("copy"):
                vc, ve = T.axis.remap("SS", [c, e])
                B[vc, ve] = A[vc, ve, 0]


@T.prim_func(s_tir=True)
def scattered_fp8(A: T.Buffer((4, 2), "float8_e4m3fn"), B: T.Buffer((4, 2, 3), "float8_e4m3fn")):
    for c in T.parallel(4, annotations=X):
        for e in T.vectorized(2):
            with T.sblock("copy"):
                vc, ve = T.axis.remap("SS", [c, e])
                B[vc, ve, 0] = A[vc, ve]


def vectorised_outside() -> Any:
    """A vectorised loop around an exchange."""
    sch = ir.Schedule(temporal)
    loop = sch.get_loops(sch.get_sblock("read"))[0]

    def vectorised(node: Any, mutator: Any) -> Any:
        kind = ir.ForKind.VECTORIZED if str(node.loop_var.name) == name else None
        node = mutator.default_mutate(node)
        return node if kind is None else ir.for_like(node, node.body, kind=kind)

    name = str(sch.get(loop).loop_var.name)
    func = sch.mod["main"]
    return ir.with_body(func, ir.mutate(func.body, (ir.For, vectorised)))


def vectors(lanes: int, *, stride: int = 1, start: int = 0) -> Any:
    """Reads of a peer's slab by vectors, perhaps with a stride or from an odd start."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 128), "float32"), B: T.Buffer((4, 128), "float32")):
        for b in T.thread_binding(1, thread="blockIdx.x"):
            with T.sblock("tile"):
                P = T.sblock_alloc_buffer((4, 128), "float32", scope="shared.dsm")
                for c in T.parallel(4, annotations=X):
                    for e in range(128):
                        P[c, e] = A[c + b, e]
                for z in T.parallel(4, annotations=X):
                    for v in T.vectorized(lanes):
                        B[z, v] = P[3 - z, v * stride + start]

    return func
