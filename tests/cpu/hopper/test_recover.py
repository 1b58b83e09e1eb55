"""Tile programs read off scheduled products."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

from crossfuse import _tvm as ir
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.program.tile import with_parameters
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.markers import is_tile_program
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs


def scheduled(text: str, **tiles: int) -> Any:
    return schedule_tiled_gemm(prim_func(parse(f"gemm:{text}")), tiles=TensorTiles(**tiles))


def recovered(text: str, **tiles: int) -> TileProgram:
    return recover(only_function(scheduled(text, **tiles)))[0][0]


def assert_equal(program: TileProgram, found: Any, wanted: tuple[Any, ...]) -> None:
    """Indices are equal for all values of the program's variables."""
    known = ir.sym.Analyzer()
    loop = program.contraction
    extents = {each.var: each.extent for each in program.places} | {loop.step: loop.steps}
    for var, extent in extents.items():
        known.bind(var, ir.tvm.ir.Range(0, extent))
    for index, expected in zip(found, wanted, strict=True):
        assert known.can_prove_equal(index, expected), f"{index}, not {expected}"


def row_and_column(program: TileProgram, group: int, columns: int) -> tuple[Any, Any]:
    """Index of the tile's row among clusters, and of its column: groups of rows inside columns."""
    (grid,) = program.grid
    number = grid.var
    inner = number % group
    outer = number // (group * columns)
    return outer * group + inner, number // group % columns


@pytest.mark.parametrize(
    ("text", "tiles", "places"),
    [
        ("M=64,N=64,K=64", {}, (1, 1)),
        ("M=128,N=512,K=64", {"rows": 128}, (2, 1)),
        ("M=512,N=512,K=64", {"rows": 128}, (4, 2)),
        ("M=512,N=512,K=64", {"cluster": 4}, (2, 4)),
        ("M=512,N=512,K=64", {"cluster": 1, "columns": 64}, (32, 1)),
        ("M=1000,N=520,K=64", {"rows": 128}, (12, 2)),
        ("M=1000,N=520,K=64", {"rows": 64, "cluster": 4}, (12, 4)),
        ("M=40,N=24,K=64", {"cluster": 2}, (1, 2)),
    ],
)
def test_places(text: str, tiles: dict[str, int], places: tuple[int, int]) -> None:
    program = recovered(f"{text},dtype=float16,weights=nk", **tiles)
    assert [each.tag for each in program.places] == ["blockIdx.x", "cluster.x"]
    assert tuple(each.extent for each in program.places) == places
    assert [each.tag for each in program.grid] == ["blockIdx.x"]
    assert [each.tag for each in program.cluster] == ["cluster.x"]
    assert (program.tiles, program.cluster_size) == places


@pytest.mark.parametrize("weights", ["nk", "kn"])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_tiles_of_a_product(cluster: int, weights: str) -> None:
    """4096 rows are 32 tiles, of which 8 rows of clusters are neighbours."""
    program = recovered(f"M=4096,N=768,K=256,dtype=bfloat16,weights={weights}", cluster=cluster)
    loop = program.contraction
    row, column = row_and_column(program, 8, 3)
    (rank,) = (each.var for each in program.cluster)
    first_row, step = (row * cluster + rank) * 128, loop.step * 64
    assert_equal(program, loop.left.origin, (first_row, step))
    right = (column * 256, step) if weights == "nk" else (step, column * 256)
    (made,) = loop.products
    assert_equal(program, made.right.origin, right)
    assert_equal(program, program.store.tile.origin, (first_row, column * 256))
    assert loop.left.shape == (128, 64)
    assert made.right.shape == ((256, 64) if weights == "nk" else (64, 256))
    assert program.store.tile.shape == (128, 256)
    assert made.is_transposed == (weights == "kn")
    assert (loop.rows, loop.columns, loop.depth) == (128, 256, 64)
    assert (loop.steps, loop.stages) == (4, 0)


def test_buffers_are_the_parameters() -> None:
    func = only_function(scheduled("M=64,N=96,K=128,dtype=float16,weights=nk"))
    ((program,),) = recover(func)
    loop = program.contraction
    a, b, out = func.params
    assert loop.left.buffer.same_as(a)
    (made,) = loop.products
    assert made.right.buffer.same_as(b)
    assert program.store.tile.buffer.same_as(out)
    assert [str(each.name) for each in program.parameters] == ["A", "B", "out"]
    assert loop.left.extents == (64, 128)
    assert made.right.extents == (96, 128)
    assert program.store.tile.extents == (64, 96)
    assert (str(made.accumulator.ty.dtype), str(made.accumulator.scope())) == ("float32", "local")


@pytest.mark.parametrize(
    ("text", "tiles", "shape", "steps"),
    [
        ("M=200,N=136,K=80", {"rows": 128}, (128, 136, 64), 2),
        ("M=1,N=8,K=8", {}, (64, 8, 64), 1),
        ("M=40,N=64,K=64", {}, (64, 64, 64), 1),
        ("M=40,N=64,K=64", {"rows": 128}, (128, 64, 64), 1),
        ("M=64,N=60,K=64", {}, (64, 64, 64), 1),
        ("M=64,N=300,K=64", {"rows": 64}, (64, 256, 64), 1),
        ("M=64,N=40,K=64", {"columns": 128}, (64, 128, 64), 1),
        ("M=64,N=64,K=24", {}, (64, 64, 64), 1),
        ("M=65,N=257,K=65", {"rows": 64, "cluster": 1}, (64, 256, 64), 2),
        ("M=385,N=200,K=136", {"rows": 192, "columns": 96}, (192, 96, 64), 3),
    ],
)
@pytest.mark.parametrize("weights", ["nk", "kn"])
def test_tails_have_whole_tiles(
    text: str, tiles: dict[str, int], shape: tuple[int, int, int], steps: int, weights: str
) -> None:
    program = recovered(f"{text},dtype=float16,weights={weights}", **tiles)
    loop, (rows, columns, depth) = program.contraction, shape
    assert loop.left.shape == (rows, depth)
    assert loop.products[0].right.shape == (
        (columns, depth) if weights == "nk" else (depth, columns)
    )
    assert program.store.tile.shape == (rows, columns)
    assert loop.steps == steps


@pytest.mark.parametrize(
    ("dtype", "depth"),
    [("float16", 64), ("bfloat16", 64), ("float8_e4m3fn", 128), ("float8_e5m2", 128)],
)
def test_types_decide_the_depth(dtype: str, depth: int) -> None:
    program = recovered(f"M=128,N=128,K=512,dtype={dtype},out=float32,weights=nk")
    loop = program.contraction
    assert (loop.left.dtype, loop.products[0].right.dtype) == (dtype, dtype)
    assert (loop.depth, loop.steps) == (depth, 512 // depth)
    assert program.store.tile.dtype == "float32"


def test_stages_are_those_of_the_annotation() -> None:
    program = recovered("M=64,N=64,K=128,dtype=float16,weights=nk", stages=3)
    assert program.contraction.stages == 3


@pytest.mark.parametrize("act", ["identity", "silu", "gelu_tanh", "x*x + 1"])
@pytest.mark.parametrize("out", ["float16", "float32"])
def test_store_keeps_the_expression(act: str, out: str) -> None:
    func = only_function(scheduled(f"M=64,N=64,K=64,dtype=float16,act={act},out={out}"))
    store = recover(func)[0][0].store
    found: list[Any] = []
    ir.walk(func.body, (ir.SBlock, found.append))
    (block,) = (each for each in found if str(each.name_hint) == "out")
    tvm.ir.assert_structural_equal(store.value, block.body.value, map_free_vars=True)
    assert str(store.value.ty) == out
    row, column = (each.var for each in block.iter_vars)
    assert store.row.same_as(row)
    assert store.column.same_as(column)


def test_with_parameters_replaces_every_buffer() -> None:
    program = recovered("M=200,N=64,K=64,dtype=float16,weights=nk")
    images = {
        each: ir.tirx.decl_buffer(each.ty.shape, each.ty.dtype, f"{each.name}_image")
        for each in program.parameters
    }
    other = with_parameters(program, images)
    assert [str(each.name) for each in other.parameters] == ["A_image", "B_image", "out_image"]
    assert str(other.contraction.left.buffer.name) == "A_image"
    assert str(other.contraction.products[0].right.buffer.name) == "B_image"
    assert str(other.store.tile.buffer.name) == "out_image"
    assert other.contraction.left.origin == program.contraction.left.origin
    assert with_parameters(program, {}) is program


def test_stages_make_a_tile_program() -> None:
    spec = parse("gemm:M=64,N=64,K=64,dtype=float16")
    assert is_tile_program(only_function(schedule_tiled_gemm(prim_func(spec))))
    assert not is_tile_program(prim_func(spec))
    assert not is_tile_program(only_function(schedule_split_k(prim_func(spec), cluster=2)))


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("M=70,N=36,K=40,dtype=float16,weights=nk", {"rows": 64, "columns": 24, "cluster": 2}),
        ("M=33,N=50,K=72,dtype=bfloat16,weights=kn,act=silu", {}),
        ("M=130,N=17,K=136,dtype=float16,weights=nk,out=float32", {"cluster": 4}),
    ],
)
def test_the_schedule_computes_the_product(text: str, tiles: dict[str, int]) -> None:
    spec = parse(f"gemm:{text}")
    inputs = random_inputs(spec, 0)
    report = run_sequential(scheduled(text, **tiles), inputs)
    report.raise_if_wrong()
    check(spec, inputs, report.outputs["out"])
