"""Functions that are no chains of products, in TE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from cpu.study.kernels import half, product, tensor


def plain(x: te.Tensor, w: te.Tensor) -> te.Tensor:
    """x @ w.T for matrices."""
    rows, depth = x.shape
    return product(lambda i, j, k: x(i, k), lambda i, j, k: w(j, k), (rows, w.shape[0]), depth)


def _three() -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    return tensor((8, 4), "x"), tensor((10, 4), "w"), tensor((8, 10), "d")


def gather() -> list[te.Tensor]:
    x, w, _ = _three()
    rows = tensor((8,), "rows", "int32")
    out = product(lambda i, j, k: x(rows(i), k), lambda i, j, k: w(j, k), (8, 10), 4)
    return [x, w, rows, half(out)]


def squares() -> list[te.Tensor]:
    x, w = tensor((64, 4), "x"), tensor((10, 4), "w")
    out = product(lambda i, j, k: x(i * i, k), lambda i, j, k: w(j, k), (8, 10), 4)
    return [x, w, half(out)]


def used_twice() -> list[te.Tensor]:
    x, w, d = _three()
    made = half(plain(x, w))
    out = plain(made, d)
    last = te.compute((8, 8), lambda i, j: out(i, j) + made(i, j).astype("float32"), "last")
    return [x, w, d, last]


def two_computed() -> list[te.Tensor]:
    x, w, _ = _three()
    y, v = tensor((6, 4), "y"), tensor((10, 4), "v")
    return [x, w, y, v, half(plain(half(plain(x, w)), half(plain(y, v))))]


def two_chains() -> list[te.Tensor]:
    x, w, _ = _three()
    y, v = tensor((8, 4), "y"), tensor((10, 4), "v")
    one, other = plain(x, w), plain(y, v)
    return [x, w, y, v, te.compute((8, 10), lambda i, j: one(i, j) + other(i, j), "both")]


def three_weights() -> list[te.Tensor]:
    x, w, _ = _three()
    v, u = tensor((10, 4), "v"), tensor((10, 4), "u")
    made = [plain(x, each) for each in (w, v, u)]
    return [x, w, v, u, te.compute((8, 10), lambda i, j: sum(m(i, j) for m in made), "all")]


def two_outputs() -> list[te.Tensor]:
    x, w, d = _three()
    made = half(plain(x, w))
    return [x, w, d, made, half(plain(made, d))]


def of_max() -> list[te.Tensor]:
    x, w, _ = _three()
    k = te.reduce_axis((0, 4), "k")
    out = te.compute((8, 10), lambda i, j: te.max(x(i, k) * w(j, k), axis=k), "largest")
    return [x, w, half(out)]


def element_wise() -> list[te.Tensor]:
    x, *_ = _three()
    return [x, te.compute(x.shape, lambda i, k: x(i, k) * 2, "twice")]


def heads() -> list[te.Tensor]:
    """Columns become matrices of a batch."""
    x, w = tensor((8, 4), "x"), tensor((12, 4), "w")
    made = half(plain(x, w))
    v = tensor((3, 5, 4), "v")
    out = product(
        lambda h, i, j, k: made(i, h * 4 + k), lambda h, i, j, k: v(h, j, k), (3, 8, 5), 4
    )
    return [x, w, v, half(out)]


def windows_between() -> list[te.Tensor]:
    x, w = tensor((10, 4), "x"), tensor((6, 4), "w")
    made, v = half(plain(x, w)), tensor((5, 3, 6), "v")
    out = product(lambda i, j, r, k: made(i + r, k), lambda i, j, r, k: v(j, r, k), (8, 5), 3, 6)
    return [x, w, v, half(out)]


def part_of_columns() -> list[te.Tensor]:
    x, w = tensor((8, 4), "x"), tensor((10, 4), "w")
    made, v = half(plain(x, w)), tensor((6, 5), "v")
    out = product(lambda i, j, k: made(i, k), lambda i, j, k: v(j, k), (8, 6), 5)
    return [x, w, v, half(out)]


def rotated() -> list[te.Tensor]:
    x, w, d = _three()
    made = plain(x, w)
    turned = te.compute(
        (8, 10),
        lambda i, j: (made(i, j) - made(i, (j + 5) % 10)).astype("float16"),
        "turned",
    )
    return [x, w, d, half(plain(turned, d))]


def rows_summed() -> list[te.Tensor]:
    """Three products, of which the last sums the rows of the first."""
    x, w, _ = _three()
    v, u = tensor((6, 10), "v"), tensor((5, 8), "u")
    made = half(plain(half(plain(x, w)), v))
    out = product(lambda i, j, k: u(i, k), lambda i, j, k: made(k, j), (5, 6), 8)
    return [x, w, v, u, half(out)]


def other_batch() -> list[te.Tensor]:
    x, w, v = tensor((3, 4, 5), "x"), tensor((3, 6, 5), "w"), tensor((4, 7, 6), "v")
    made = half(product(lambda b, i, j, k: x(b, i, k), lambda b, i, j, k: w(b, j, k), (3, 4, 6), 5))
    out = product(lambda b, i, j, k: made(b, i, k), lambda b, i, j, k: v(i, j, k), (3, 4, 7), 6)
    return [x, w, v, half(out)]


def normalised_weight() -> list[te.Tensor]:
    x, w, _ = _three()
    k = te.reduce_axis((0, 4), "k")
    most = te.compute((10,), lambda j: te.max(w(j, k), axis=k), "most")
    scaled = te.compute(w.shape, lambda j, k: w(j, k) / most(j), "scaled")
    return [x, w, half(plain(x, scaled))]


def mask_of_all() -> list[te.Tensor]:
    x, w, _ = _three()
    mask = tensor((8, 10, 4), "mask")
    kept = lambda i, j, k: w(j, k) * mask(i, j, k)  # noqa: E731
    return [x, w, mask, half(product(lambda i, j, k: x(i, k), kept, (8, 10), 4))]


def any_rows() -> list[te.Tensor]:
    x, w = te.placeholder((te.var("rows"), 4), "float16", "x"), tensor((10, 4), "w")
    return [x, w, half(plain(x, w))]


def reduced_input() -> list[te.Tensor]:
    """A maximum of what is no operand."""
    x, w, _ = _three()
    y, k = tensor((8, 3), "y"), te.reduce_axis((0, 3), "k")
    most = te.compute((8,), lambda i: te.max(y(i, k), axis=k), "most")
    made = plain(x, w)
    return [x, w, y, te.compute((8, 10), lambda i, j: made(i, j) + most(i), "last")]


def four_bits() -> list[te.Tensor]:
    x, w = tensor((8, 4), "x"), tensor((10, 4), "w", "int4")
    return [x, w, half(plain(x, w))]


def stray() -> list[te.Tensor]:
    """A product of which only a maximum is used."""
    x, w, _ = _three()
    made, k = plain(x, w), te.reduce_axis((0, 10), "k")
    most = te.compute((8,), lambda i: te.max(made(i, k), axis=k), "most")
    return [x, w, te.compute((8, 3), lambda i, j: most(i) + tirx.const(0, "float32"), "last")]


def function(case: Callable[[], list[te.Tensor]]) -> Any:
    return te.create_prim_func(case())
