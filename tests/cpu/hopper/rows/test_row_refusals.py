"""What the lowering of rows before a product refuses, by rule and in words."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx

from cpu.hopper.rows.products import of_spec, quantised, scheduled, spec
from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_last_product
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.errors import CascadeRefused, LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.plan.phase import REGISTERS
from crossfuse.lower.hopper.rows.plan import BESIDE_CHUNKS, REGISTERS_BESIDE_ROWS
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import bind_product
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

INSTEAD = (
    ". Instead: schedule as schedule_rows_gemm does, or leave grid_stage out and make the rows in "
    "a kernel of their own."
)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "two warps a row": (
        {"stream": StreamTiles(threads=64)},
        "rows: loop 'thread': found 64 iterations bound to threadIdx.x; limit: 70 rows bound to "
        "blockIdx.x, and the 32 threads of a warp or 128 of a warpgroup to threadIdx.x" + INSTEAD,
    ),
    "rows side by side": (
        {"stream": StreamTiles(threads=32, rows=2)},
        "rows: loop 'row_1': found 2 iterations bound to threadIdx.y; limit: 70 rows bound to "
        "blockIdx.x, and the 32 threads of a warp or 128 of a warpgroup to threadIdx.x" + INSTEAD,
    ),
    "elements in shared memory": (
        {"stream": StreamTiles(threads=32, resident="shared")},
        "rows: buffer 'x_0_kept_shared.dyn': found scope shared.dyn; limit: registers: the rings "
        "of the product have the shared memory" + INSTEAD,
    ),
    "more sums than registers": (
        {"rows": 256, "columns": 192},
        "rows: tile of 256 x 192: found 192 registers of a thread for sums; limit: 160: warps that "
        "make rows have the others. Instead: take narrower tiles, or make the rows in a kernel of "
        "their own.",
    ),
}


WHOLE = "or make whole rows: leave the chunk out."
CHUNKS: dict[str, tuple[CascadeSpec, dict[str, int], str]] = {
    "a chunk that does not divide the row": (
        quantised(64, 768, 32),
        {"rows": 64, "columns": 16, "chunk": 512},
        "cascade-stream: rows, chunk: found chunks of 512 of 768 elements in 1 loops over rows; "
        "limit: a multiple of 256 (a vector of each thread of a warp) that divides the row. "
        "Instead: pass another chunk, " + WHOLE,
    ),
    "a norm": (
        spec(64, 512, 32),
        {"rows": 64, "columns": 16, "chunk": 256},
        "cascade-stream: state squares, product: found sum, sum; limit: a largest magnitude, and a "
        "sum that is corrected by a factor of it. Instead: make whole rows: leave the chunk out.",
    ),
    "factors that TMA does not copy": (
        quantised(70, 512, 32),
        {"rows": 64, "columns": 16, "chunk": 256},
        "rows: tensor 'factors': found rows of 280 bytes; limit: rows of a multiple of 16 bytes, "
        "which TMA copies. Instead: take other tiles, " + WHOLE,
    ),
    "more rows than a warp has states of": (
        quantised(128, 512, 32),
        {"rows": 128, "columns": 32, "cluster": 1, "chunk": 256},
        "rows: tile of 128 rows: found 64 rows of a warp, in chunks of 256; limit: 16 rows, whose "
        "states are in registers, and chunks of whole boxes of 256 and steps of 128 elements. "
        "Instead: take other tiles, " + WHOLE,
    ),
    "two blocks of rows": (
        quantised(256, 512, 256),
        {"rows": 256, "columns": 16, "cluster": 1, "chunk": 256},
        "rows: tile of 256 x 16: found 2 blocks of 64 rows of a warpgroup; limit: one block, whose "
        "sums have two factors in a thread. Instead: take tiles of fewer rows, " + WHOLE,
    ),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_refusals_of_chunks(name: str) -> None:
    given, sizes, text = CHUNKS[name]
    with pytest.raises((CascadeRefused, LoweringRefused)) as caught:
        lower(of_spec(given, **sizes))
    assert str(caught.value) == text


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    sizes, text = CASES[name]
    with pytest.raises(LoweringRefused) as caught:
        lower(of_spec(spec(70, 512, 192), **{"rows": 64, "columns": 64, **sizes}))
    assert str(caught.value) == text


def test_a_split_reduction_of_quantised_rows() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        of_spec(quantised(70, 256, 32), rows=64, columns=16, split=2)
    assert str(caught.value) == (
        "tiles: block 'out': found a reduction split over 2 CTAs, and an epilogue that reads what "
        "an earlier nest makes; limit: one or the other. Instead: leave out the split."
    )


@pytest.mark.parametrize("registers", [REGISTERS, REGISTERS_BESIDE_ROWS, BESIDE_CHUNKS])
def test_warpgroups_ask_for_no_more_registers_than_a_cta_has(
    registers: dict[int, tuple[int, int]],
) -> None:
    for consumers, (fewer, more) in registers.items():
        launched = 65536 // (128 * (consumers + 1)) // 8 * 8
        assert fewer + consumers * more <= launched * (consumers + 1)


@pytest.mark.parametrize("threads", [32, 128])
def test_reductions_of_tvm(threads: int) -> None:
    sch = ir.Schedule(scaled_rows(depth=256))
    squares, left = (sch.get_sblock(name) for name in ("squares", "left"))
    row, column = sch.get_loops(squares)
    sch.bind(row, "blockIdx.x")
    sch.bind(sch.split(column, [None, threads])[1], "threadIdx.x")
    sch.set_scope(squares, 0, "local")
    sch.reverse_compute_at(left, row)
    sch.bind(sch.split(sch.get_loops(left)[-1], [None, threads])[1], "threadIdx.x")
    bind_product(sch, read_last_product(sch), TensorTiles(rows=64, columns=16), False)
    sch.grid_stage(left)
    with pytest.raises(LoweringRefused) as caught:
        lower(sch)
    assert str(caught.value) == (
        "rows: loop bound to threadIdx.x: found a reduction over threads that is TVM's own; limit: "
        "merges, which are blocks with the annotation crossfuse.merge" + INSTEAD
    )


def scaled_rows(depth: int = 128) -> Any:
    """Rows over the root of their squares, by a factor that is one number in memory."""
    x, weight = (
        te.placeholder(shape, "bfloat16", name)
        for name, shape in (("x", (70, depth)), ("weight", (32, depth)))
    )
    factor = te.placeholder((1,), "float32", "factor")
    j, k = te.reduce_axis((0, depth), "j"), te.reduce_axis((0, depth), "k")

    def wide(value: Any) -> Any:
        return value.astype("float32")

    squares = te.compute((70,), lambda i: te.sum(wide(x[i, j]) * wide(x[i, j]), axis=j), "squares")
    left = te.compute(
        x.shape,
        lambda i, c: (wide(x[i, c]) * tirx.rsqrt(squares[i]) * factor[0]).astype("bfloat16"),
        "left",
    )
    product = te.compute(
        (70, 32), lambda i, n: te.sum(wide(left[i, k]) * wide(weight[n, k]), axis=k), "product"
    )
    out = te.compute(product.shape, lambda i, n: product[i, n].astype("bfloat16"), "out")
    return te.create_prim_func([x, factor, weight, out])


def test_a_launch_does_not_start_early_for_rows_with_a_number_from_memory() -> None:
    """Its address comes from no row and no lane: nvcc may load it in front of the wait."""
    (launch,) = lower(scheduled(scaled_rows(), constant=True, rows=64, columns=16)).image.launches
    assert launch.cooperative and not launch.early
