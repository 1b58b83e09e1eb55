"""Functions of chains as people and importers write them, in TE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx


def tensor(shape: tuple[int, ...], name: str, dtype: str = "float16") -> te.Tensor:
    return te.placeholder(shape, dtype, name)


def product(left: Callable, right: Callable, shape: tuple[int, ...], *depth: int) -> te.Tensor:
    """A sum over the last indices of two operands, in float32."""
    loops = [te.reduce_axis((0, extent), f"k{index}") for index, extent in enumerate(depth)]

    def element(*at: Any) -> Any:
        one, other = (each(*at, *loops).astype("float32") for each in (left, right))
        return te.sum(one * other, axis=loops)

    return te.compute(shape, element, name="product")


def half(value: te.Tensor) -> te.Tensor:
    return te.compute(value.shape, lambda *at: value(*at).astype("float16"), name="half")


def attention(heads: int = 3, groups: int = 3) -> Any:
    """Softmax of scaled scores with a mask; heads may share keys and values."""
    share = heads // groups
    q, k = tensor((heads, 8, 4), "q"), tensor((groups, 10, 4), "k")
    v, mask = tensor((groups, 10, 6), "v"), tensor((8, 10), "mask", "float32")
    scores = product(
        lambda h, i, j, d: q(h, i, d), lambda h, i, j, d: k(h // share, j, d), (heads, 8, 10), 4
    )
    masked = te.compute(scores.shape, lambda h, i, j: scores(h, i, j) * 0.5 + mask(i, j), "masked")
    j0, j1 = te.reduce_axis((0, 10), "j"), te.reduce_axis((0, 10), "j")
    most = te.compute((heads, 8), lambda h, i: te.max(masked(h, i, j0), axis=j0), "most")
    power = te.compute(
        scores.shape, lambda h, i, j: tirx.exp(masked(h, i, j) - most(h, i)), "power"
    )
    total = te.compute((heads, 8), lambda h, i: te.sum(power(h, i, j1), axis=j1), "total")
    share_of = te.compute(
        scores.shape,
        lambda h, i, j: (power(h, i, j) / total(h, i)).astype("float16"),
        "share",
    )
    out = product(
        lambda h, i, d, j: share_of(h, i, j),
        lambda h, i, d, j: v(h // share, j, d),
        (heads, 8, 6),
        10,
    )
    return te.create_prim_func([q, k, v, mask, half(out)])


def late_denominator() -> Any:
    """Attention whose sums are divided after the second product."""
    q, k, v = tensor((8, 4), "q"), tensor((10, 4), "k"), tensor((10, 6), "v")
    scores = product(lambda i, j, d: q(i, d), lambda i, j, d: k(j, d), (8, 10), 4)
    power = te.compute(scores.shape, lambda i, j: tirx.exp(scores(i, j)), "power")
    loop = te.reduce_axis((0, 10), "j")
    total = te.compute((8,), lambda i: te.sum(power(i, loop), axis=loop), "total")
    out = product(lambda i, d, j: half_of(power)(i, j), lambda i, d, j: v(j, d), (8, 6), 10)
    last = te.compute(out.shape, lambda i, d: (out(i, d) / total(i)).astype("float16"), "last")
    return te.create_prim_func([q, k, v, last])


_HALVES: dict[te.Tensor, te.Tensor] = {}


def half_of(value: te.Tensor) -> te.Tensor:
    """The same `half` of a tensor every time."""
    return _HALVES.setdefault(value, half(value))


def normalised() -> Any:
    """The root mean square of the rows, then one product."""
    x, g, w = tensor((8, 4), "x"), tensor((4,), "g"), tensor((6, 4), "w")
    loop = te.reduce_axis((0, 4), "k")
    wide = te.compute(x.shape, lambda i, k: x(i, k).astype("float32"), "wide")
    mean = te.compute((8,), lambda i: te.sum(wide(i, loop) * wide(i, loop), axis=loop), "mean")
    row = te.compute(
        x.shape,
        lambda i, k: (wide(i, k) * tirx.rsqrt(mean(i)) * g(k).astype("float32")).astype("float16"),
        "row",
    )
    out = product(lambda i, j, k: row(i, k), lambda i, j, k: w(j, k), (8, 6), 4)
    return te.create_prim_func([x, g, w, half(out)])


def dequantised() -> Any:
    """Weights of 8 bits with a scale for each column and two of each 8 rows."""
    x, w = tensor((8, 16), "x"), tensor((6, 16), "w", "int8")
    scale = tensor((6, 2), "scale", "float32")
    wide = te.compute(
        w.shape, lambda j, k: (w(j, k).astype("float32") * scale(j, k // 8)).astype("float16"), "d"
    )
    out = product(lambda i, j, k: x(i, k), lambda i, j, k: wide(j, k), (8, 6), 16)
    return te.create_prim_func([scale, w, x, half(out)])


def convolutions(channels_first: bool) -> Any:
    """A convolution of windows of 3 x 3 on padded images, then one of 1 x 1."""
    shape = (2, 4, 5, 7) if channels_first else (2, 5, 7, 4)
    x = tensor(shape, "x")
    w0, w1 = tensor((3, 3, 4, 6), "w0"), tensor((6, 8), "w1")

    def pixel(n: Any, y: Any, x_: Any, c: Any) -> Any:
        inside = tirx.all(y >= 1, y < 6, x_ >= 1, x_ < 8)
        at = (n, c, y - 1, x_ - 1) if channels_first else (n, y - 1, x_ - 1, c)
        return tirx.if_then_else(inside, x(*at), tirx.const(0, "float16"))

    padded = te.compute((2, 7, 9, 4), pixel, "padded")
    made = product(
        lambda n, y, x_, o, r, s, c: padded(n, y + r, x_ + s, c),
        lambda n, y, x_, o, r, s, c: w0(r, s, c, o),
        (2, 5, 7, 6),
        3,
        3,
        4,
    )
    relu = te.compute(
        made.shape, lambda *at: tirx.max(made(*at), tirx.const(0, "float32")).astype("float16")
    )
    out = product(
        lambda n, y, x_, o, c: relu(n, y, x_, c), lambda n, y, x_, o, c: w1(c, o), (2, 5, 7, 8), 6
    )
    return te.create_prim_func([x, w0, w1, half(out)])


def from_the_right() -> Any:
    """Weights on the left of both products: columns take the place of rows."""
    x, w0, w1 = tensor((4, 8), "x"), tensor((10, 4), "w0"), tensor((6, 10), "w1")
    made = half(product(lambda i, j, k: w0(i, k), lambda i, j, k: x(k, j), (10, 8), 4))
    out = product(lambda i, j, k: w1(i, k), lambda i, j, k: made(k, j), (6, 8), 10)
    return te.create_prim_func([x, w0, w1, half(out)])


def joined_weights() -> Any:
    """Gate and up from the halves of one parameter."""
    x, w, d = tensor((8, 4), "x"), tensor((20, 4), "w"), tensor((6, 10), "d")
    gate = product(lambda i, j, k: x(i, k), lambda i, j, k: w(j, k), (8, 10), 4)
    up = product(lambda i, j, k: x(i, k), lambda i, j, k: w(j + 10, k), (8, 10), 4)
    made = te.compute(
        (8, 10), lambda i, j: (tirx.sigmoid(gate(i, j)) * up(i, j)).astype("float16"), "made"
    )
    out = product(lambda i, j, k: made(i, k), lambda i, j, k: d(j, k), (8, 6), 10)
    return te.create_prim_func([x, w, d, half(out)])


def grouped() -> Any:
    """Rows in one run, of which each 4 have weights of their own."""
    x, w = tensor((12, 4), "x"), tensor((3, 6, 4), "w")
    out = product(lambda i, j, k: x(i, k), lambda i, j, k: w(i // 4, j, k), (12, 6), 4)
    return te.create_prim_func([x, w, half(out)])
