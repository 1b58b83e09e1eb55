"""Complete schedules of canonical functions at small shapes, for both checkers."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from crossfuse.blocks.scheduled import bindings, binds, is_reduction
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.workload import parse, prim_func

THREADS = 2
ROWS = 4


def gemm(ranks: int, combine: str = "sum") -> Any:
    """8 rows, two columns and two reduction elements for each CTA."""
    text = f"gemm:M=8,K={2 * ranks},N={2 * ranks},dtype=float32,combine={combine}"
    return prim_func(parse(text))


def chain(ranks: int) -> Any:
    """8 rows, four intermediate and two output columns for each CTA."""
    text = f"gemm_chain:M=8,K={2 * ranks},N={4 * ranks},L={2 * ranks},dtype=float32,act=relu"
    return prim_func(parse(text))


def scatter(func: Any, ranks: int) -> Any:
    sch = Schedule(func)
    product, out = sch.get_sblock("gemm0"), sch.get_sblock("out")
    i, j, k = sch.get_loops(product)
    tile, row = sch.split(i, [None, ROWS])
    rank, rest = sch.split(k, [ranks, None])
    sch.reorder(tile, rank, rest, row, j)
    sch.bind(tile, "blockIdx.y")
    partial = sch.dsm_reduce(product, rank)
    fill(sch, partial, 2)
    _, _, element, _ = sch.get_loops(product)
    x = spread(sch, element)
    sch.set_scope(product, 0, "local")
    sch.reverse_compute_at(out, x, preserve_unit_loops=True)
    sch.decompose_reduction(product, sch.get_loops(product)[-1])
    return sch


def exchange_slices(func: Any, ranks: int) -> Any:
    sch = Schedule(func)
    product, out = sch.get_sblock("gemm0"), sch.get_sblock("out")
    i, j = sch.get_loops(out)
    tile, row = sch.split(i, [None, ROWS])
    nest, column = sch.split(j, [ranks, None])
    sch.reorder(tile, nest, row, column)
    sch.bind(tile, "blockIdx.y")
    sch.cluster_bind(nest)
    partial = _exchange(sch, product, ranks)
    fill(sch, partial, 2)
    combine(sch, product, 2)
    spread(sch, row, column)
    return sch


def exchange_chain(func: Any, ranks: int) -> Any:
    """The second product reads the first, its activation inlined, whole in each CTA."""
    sch = Schedule(func)
    first, second, out = (sch.get_sblock(name) for name in ("gemm0", "gemm1", "out"))
    sch.compute_inline(sch.get_sblock("hidden"))
    nest = columns(sch, second, ranks)
    partial = _exchange(sch, first, ranks)
    fill(sch, partial, 2)
    combine(sch, first, 2)
    finish(sch, second, out, nest)
    return sch


def _exchange(sch: Any, product: Any, ranks: int) -> Any:
    i, j, k = sch.get_loops(product)
    tile, row = sch.split(i, [None, ROWS])
    rank, rest = sch.split(k, [ranks, None])
    sch.reorder(tile, rank, rest, row, j)
    return sch.dsm_reduce(product, rank, scatter=False)


def shuffle(func: Any, ranks: int, *, ring: bool, parts: int = 1, rows_on_y: int = 0) -> Any:
    """Slices in a ring or all gathered, in `parts` parts; rows over axis y if that is given."""
    sch = Schedule(func)
    hidden, second, out = (sch.get_sblock(name) for name in ("hidden", "gemm1", "out"))
    nest = columns(sch, second, ranks, rows_on_y)
    *_, k = sch.get_loops(second)
    step, rest = sch.split(k, [ranks, None])
    part, inner = sch.split(rest, [parts, None])
    sch.reorder(step, part, *list(sch.get_loops(second))[2 + bool(rows_on_y) : -3], inner)
    at = (step if parts == 1 else part) if ring else nest
    stage = sch.dsm_shuffle(hidden, second, 0, at, ring=ring)
    spread(sch, *list(sch.get_loops(stage))[-2:])
    depth = 2 + bool(rows_on_y)
    spread(sch, *list(sch.get_loops(hidden))[depth:])
    first = sch.get_sblock("gemm0")
    sch.set_scope(first, 0, "local")
    sch.compute_at(first, sch.get_loops(hidden)[-1], preserve_unit_loops=True)
    sch.decompose_reduction(first, sch.get_loops(first)[-1])
    finish(sch, second, out, nest, init=step)
    return sch


def columns(sch: Any, product: Any, ranks: int, rows_on_y: int = 0) -> Any:
    """Bind a part of a product's columns to the cluster, and its tile to threads."""
    i, j, k = sch.get_loops(product)
    tile, row = sch.split(i, [None, ROWS])
    nest, column = sch.split(j, [ranks, None])
    sch.reorder(tile, nest, row, column, k)
    if rows_on_y:
        tile, y = sch.split(tile, [None, rows_on_y])
        sch.cluster_bind(y, "y")
    sch.bind(tile, "blockIdx.y")
    sch.cluster_bind(nest)
    spread(sch, row, column)
    return nest


def spread(sch: Any, *loops: Any) -> Any:
    """Bind the innermost part of some loops to the threads."""
    fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    _, x = sch.split(fused, [None, THREADS])
    sch.bind(x, "threadIdx.x")
    return x


def fill(sch: Any, partial: Any, depth: int) -> None:
    """Threads over a partial tile, its reduction inside."""
    loops = list(sch.get_loops(partial))[depth:]
    reduction = [each for each in loops if _is_reduction(sch, partial, each)]
    tile = [each for each in loops if not any(each is other for other in reduction)]
    sch.reorder(*tile, *reduction)
    spread(sch, *tile)
    sch.decompose_reduction(partial, reduction[0])


def combine(sch: Any, product: Any, depth: int) -> None:
    """Threads over a whole tile that is combined, the ranks inside."""
    ranks, *tile = list(sch.get_loops(product))[depth:]
    sch.reorder(*tile, ranks)
    spread(sch, *tile)
    sch.decompose_reduction(product, ranks)


def finish(sch: Any, product: Any, out: Any, nest: Any, init: Any = None) -> None:
    """Keep a product's sums on the chip and store them where its CTA is done with them."""
    sch.set_scope(product, 0, "shared")
    sch.reverse_compute_at(out, nest, preserve_unit_loops=True)
    spread(sch, *list(sch.get_loops(out))[-2:])
    sch.decompose_reduction(product, sch.get_loops(product)[-1] if init is None else init)


def _is_reduction(sch: Any, block: Any, loop: Any) -> bool:
    variable = sch.get(loop).loop_var
    return any(is_reduction(v) for v, value in bindings(sch, block) if binds(variable, value))


REDUCE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def reference(values: dict[str, np.ndarray], combine: str) -> np.ndarray:
    terms = values["A"][:, :, None].astype("f8") * values["B"][None]
    result = REDUCE[combine](terms, axis=1)
    return np.maximum(result, 0) @ values["D"] if "D" in values else result


def check(func: Any, sch: Any, cluster: tuple[int, int, int], combine: str = "sum") -> None:
    """Run the schedule on LLVM and its CUDA in the emulator, against numpy."""
    *operands, _ = func.params
    generator = np.random.default_rng(0)
    values = {
        str(each.name): generator.uniform(0.5, 1.5, [int(n) for n in each.ty.shape]).astype("f4")
        for each in operands
    }
    expected = reference(values, combine)
    sch.verify_cluster()
    report = run_sequential(sch, values)
    report.raise_if_wrong()
    np.testing.assert_allclose(report.outputs["out"], expected, rtol=1e-5)
    image = lower(sch).image
    (launch,) = image.launches
    assert launch.cluster == cluster
    emulation = emulate(image, values)
    emulation.raise_if_wrong()
    np.testing.assert_allclose(emulation.outputs["out"], expected, rtol=1e-5)
