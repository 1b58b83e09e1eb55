"""Kernels on fewer rows than they were compiled for, and the choice of one by rows, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import crossfuse
from crossfuse import workload
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm

FURTHER = "scale=last,bias=last,residual=out"
FFN = f"gated_ffn:M=128,K=512,N=1024,L=512,dtype=bfloat16,{FURTHER}"
CHAIN = f"gemm_chain:M=128,K=416,N=512,L=256,dtype=bfloat16,act=gelu,{FURTHER}"

#: Workload and rule, with the tiles named: functions of 65 rows or more have the same.
CASES: dict[str, tuple[str, Any]] = {
    "product": (
        "gemm:M=128,N=512,K=512,dtype=bfloat16,weights=nk",
        partial(schedule_tiled_gemm, tiles=TensorTiles(rows=128, columns=64, cluster=1)),
    ),
    "product, float32": (
        f"gemm:M=128,N=264,K=512,dtype=bfloat16,out=float32,{FURTHER}",
        partial(schedule_tiled_gemm, tiles=TensorTiles(rows=128, columns=64, cluster=1)),
    ),
    "split": (
        f"gemm:M=128,N=256,K=1024,dtype=bfloat16,weights=nk,{FURTHER}",
        partial(schedule_tiled_gemm, tiles=TensorTiles(rows=128, columns=64, split=4)),
    ),
    "L2": (
        FFN,
        partial(
            schedule_tiled_ffn,
            first=TensorTiles(rows=128, columns=32, cluster=4, stacked=False),
            second=TensorTiles(rows=128, columns=32),
            constant_weights=True,
        ),
    ),
    "L2, boxes": (
        FFN.removesuffix(f",{FURTHER}"),
        partial(
            schedule_tiled_ffn,
            first=TensorTiles(rows=128, columns=32, cluster=1, stacked=False),
            second=TensorTiles(rows=128, columns=32),
        ),
    ),
    "two kernels": (
        FFN,
        partial(
            schedule_tiled_ffn,
            first=TensorTiles(rows=128, columns=32, cluster=4, stacked=False),
            second=TensorTiles(rows=128, columns=32),
            staged=False,
            constant_weights=True,
        ),
    ),
    "cluster": (CHAIN, partial(schedule_clustered_ffn, tiles=ClusterTiles(64, 8, 1))),
    "cluster, ring": (
        CHAIN,
        partial(schedule_clustered_ffn, tiles=ClusterTiles(64, 8, 1), ring=True, bulk=True),
    ),
    "cluster, parts": (FFN, partial(schedule_clustered_ffn, tiles=ClusterTiles(128, 4, 4))),
    "registers": (CHAIN, partial(schedule_register_ffn, tiles=RegisterTiles(64, 64, 4, 1))),
    "registers, cluster": (FFN, partial(schedule_register_ffn, tiles=RegisterTiles(128, 64, 8, 8))),
}
#: Rows of a call.
ROWS = (1, 3, 16, 63, 64, 65, 100, 127, 128)


def inputs_of(spec: workload.WorkloadSpec) -> list[Any]:
    torch = pytest.importorskip("torch")
    from crossfuse.runtime.tensors import to_torch

    return [torch.clone(to_torch(x).cuda()) for x in workload.random_inputs(spec, 1).values()]


def rows_first(kernel: Any, given: list[Any], rows: int) -> list[Any]:
    wanted = [each for each in kernel.buffers if not each.output]
    return [x[:rows] if each.rows else x for each, x in zip(wanted, given, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_all_and_nothing_else_is_written(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    text, rule = CASES[name]
    spec = workload.parse(text)
    schedule = rule(workload.prim_func(spec))
    kernel = crossfuse.compile(schedule, fewer_rows=True, directory=tmp_path).kernel
    given = inputs_of(spec)
    whole = kernel.run(*given)
    for rows in ROWS:
        behind = torch.full_like(whole, float("nan"))
        for _ in range(20):
            kernel(*rows_first(kernel, given, rows), behind[:rows])
            assert torch.equal(behind[:rows], whole[:rows]), rows
        assert torch.isnan(behind[rows:]).all(), rows
    assert torch.equal(kernel.run(*given), whole)


@pytest.mark.parametrize("rows", [65, 100, 127])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_kernel_for_exactly_these_rows(name: str, rows: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    text, rule = CASES[name]
    spec = workload.parse(text)
    kernels = [
        crossfuse.compile(
            rule(workload.prim_func(each)), fewer_rows=fewer, directory=tmp_path, name=called
        ).kernel
        for each, fewer, called in (
            (spec, True, "fewer"),
            (replace(spec, M=rows), False, "exactly"),
        )
    ]
    given = rows_first(kernels[0], inputs_of(spec), rows)
    assert torch.equal(*(each.run(*given) for each in kernels))


@pytest.mark.parametrize("name", CASES)
def test_results_by_the_numeric_rule(name: str, tmp_path: Path) -> None:
    text, rule = CASES[name]
    spec = workload.parse(text)
    schedule = rule(workload.prim_func(spec))
    kernel = crossfuse.compile(schedule, fewer_rows=True, directory=tmp_path).kernel
    for rows in (1, 33, 127):
        few = replace(spec, M=rows)
        inputs = workload.random_inputs(few, 1)
        workload.check(few, inputs, kernel.run(*inputs.values()))


@pytest.fixture(scope="module")
def bins(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bins")
    places = {64: "registers", 256: "l2", 512: "global"}
    return crossfuse.compile_bins(FFN, placement=places, directory=folder)


@pytest.mark.parametrize(
    "rows", [0, 1, 15, 16, 17, 64, 65, 100, 128, 129, 256, 300, 512, 513, 1300]
)
def test_dispatch(bins: Any, rows: int) -> None:
    torch = pytest.importorskip("torch")
    spec = replace(workload.parse(FFN), M=max(rows, 1))
    given = rows_first(bins.dispatch, inputs_of(spec), rows)
    result = bins(*given)
    assert result.shape == (rows, 512)
    pieces = [
        bins.bins[BINS[each.bin]].kernel.run(
            *[x[each.first : each.first + each.rows] if len(x) == rows else x for x in given]
        )
        for each in bins.table.pieces(rows)
    ]
    assert torch.equal(result, torch.cat([result[:0], *pieces]))
    if rows:
        from crossfuse.runtime.tensors import to_numpy

        workload.check(spec, workload.random_inputs(spec, 1), to_numpy(result.cpu()))


@pytest.mark.parametrize("rows", [7, 130, 700])
def test_dispatch_in_a_graph(bins: Any, rows: int) -> None:
    """A graph keeps the choice, and reads what the tensors hold when it is replayed."""
    torch = pytest.importorskip("torch")
    spec = replace(workload.parse(FFN), M=rows)
    given = inputs_of(spec)
    output = torch.zeros(rows, 512, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bins.dispatch(*given, output)
    given[0].mul_(0.5)
    due = bins(*given)
    for _ in range(20):
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, due)


def test_calls_of_many_sizes_share_flags(bins: Any) -> None:
    """Rows of a call change nothing that the next launch of the same kernel counts on."""
    torch = pytest.importorskip("torch")
    spec = replace(workload.parse(FFN), M=512)
    given = inputs_of(spec)
    due = {rows: bins(*rows_first(bins.dispatch, given, rows)) for rows in range(1, 513, 37)}
    for rows in [*due, *reversed(due)] * 3:
        assert torch.equal(bins(*rows_first(bins.dispatch, given, rows)), due[rows])
