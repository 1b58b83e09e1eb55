"""What is read as the windows of a convolution, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.program.tile import WindowTile
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func
from crossfuse.workload.build import Form, Operand, Product, emit
from crossfuse.workload.conv_chain import windows

IMAGES = [(1, 1, 1), (1, 1, 7), (1, 9, 1), (2, 2, 2), (2, 5, 7), (3, 8, 8), (1, 56, 56)]


@pytest.mark.parametrize("window", [1, 3, 5, 7])
@pytest.mark.parametrize("images", IMAGES, ids=str)
def test_windows_of_all_images_are_read(images: tuple[int, int, int], window: int) -> None:
    batch, height, width = images
    text = f"conv_chain:batch={batch},H={height},W={width},IC=64,OC1=64,OC2=64,k1={window}"
    ((first,), (second,)) = recover(
        only_function(schedule_tiled_ffn(prim_func(parse(text)), staged=False))
    )
    tile = first.contraction.left
    assert isinstance(tile, WindowTile)
    assert (tile.window, tile.images) == (window, (*images, 64))
    assert tile.extents == (batch * height * width, window * window * 64)
    assert not isinstance(second.contraction.left, WindowTile)


def alone(window: int = 3) -> Any:
    """A convolution by itself, of 2 images of 9 x 8 pixels."""
    left = Operand("X", (2, 9, 8, 128), "bfloat16")
    product = Product("gemm0", Operand("B", (80, window * window * 128), "bfloat16"), "nk")
    form = Form(left, (product,), None, None, lambda t, i, j: t["gemm0"](i, j), (), "float32")
    return emit(Form(**{**vars(form), "window": window}))


@pytest.mark.parametrize(
    "tiles",
    [TensorTiles(), TensorTiles(rows=64, columns=40, cluster=2), TensorTiles(rows=64, split=2)],
    ids=["one CTA", "two tiles of rows", "a split reduction"],
)
def test_a_convolution_alone(tiles: TensorTiles) -> None:
    schedule = schedule_tiled_gemm(alone(), tiles=tiles)
    random = np.random.default_rng(0)
    a, b = (random.integers(-2, 3, shape) for shape in ((2, 9, 8, 128), (80, 1152)))
    image = lower(schedule).image
    inputs = {
        each.name: value.astype("bfloat16")
        for each, value in zip(image.buffers, (a, b), strict=False)
    }
    for report in (emulate(image, inputs, orders=2), run_sequential(schedule, inputs)):
        report.raise_if_wrong()
        np.testing.assert_array_equal(report.outputs["out"], windows(a, 3) @ b.T)


def convolution(
    down: int = -1,
    across: int = -1,
    step: int = 1,
    rows: int = 8,
    columns: int = 8,
    swapped: bool = False,
    rim: float = 0.0,
) -> Any:
    """A convolution of 3 x 3 pixels, or what is nearly one."""
    x = te.placeholder((1, 8, 8, 64), "bfloat16", "X")
    b = te.placeholder((64, 576), "bfloat16", "B")

    def element(p: Any, q: Any) -> Any:
        r, s = (q // 64 % 3, q // 192) if swapped else (q // 192, q // 64 % 3)
        i, j = p // 8 * step + r + down, p % 8 * step + s + across
        inside = tirx.all(i >= 0, i < rows, j >= 0, j < columns)
        return tirx.if_then_else(inside, x(0, i, j, q % 64), tirx.const(rim, "bfloat16"))

    view = te.compute((64, 576), element, "windows")
    k = te.reduce_axis((0, 576), "k")
    product = te.compute(
        (64, 64),
        lambda i, j: te.sum(view(i, k).astype("float32") * b(j, k).astype("float32"), axis=k),
        "gemm0",
    )
    out = te.compute((64, 64), lambda i, j: product(i, j).astype("bfloat16"), "out")
    return te.create_prim_func([x, b, out])


NEARLY = {
    "shifted down": {"down": 0},
    "shifted across": {"across": -2},
    "every second pixel": {"step": 2},
    "without the last row": {"rows": 7},
    "with what lies beyond a row": {"columns": 9},
    "column by column": {"swapped": True},
}


def test_the_whole_convolution_is_read() -> None:
    lower(schedule_tiled_gemm(convolution()))


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_a_convolution_is_refused(name: str) -> None:
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule_tiled_gemm(convolution(**NEARLY[name])))
    refusal = caught.value.refusal
    assert (refusal.rule, refusal.where) == ("tile-program", "block 'windows'")
    assert refusal.found.startswith("elements [") and refusal.found.endswith("of 'X'")
    assert refusal.limit == (
        "the pixels of a window of odd extent around each pixel, row by row, with step 1 and zeros "
        "beyond the image"
    )


def test_a_rim_of_ones_is_no_view() -> None:
    with pytest.raises(ScheduleRefused, match="an intermediate that is not made of products"):
        schedule_tiled_gemm(convolution(rim=1.0))
