"""Cascades as users write them: tensor expressions, one block for each operator."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def softmax(rows: int, length: int, dtype: str = "float32", wide: str = "float32") -> Any:
    """Rows of ``exp(x - max) / sum``."""
    x = te.placeholder((rows, length), dtype, name="X")
    k, n = (te.reduce_axis((0, length), name) for name in "kn")
    m = te.compute((rows,), lambda i: te.max(x[i, k].astype(wide), axis=k), name="m")
    s = te.compute((rows,), lambda i: te.sum(te.exp(x[i, n].astype(wide) - m[i]), axis=n), name="s")
    y = te.compute(
        (rows, length),
        lambda i, j: (te.exp(x[i, j].astype(wide) - m[i]) / s[i]).astype(dtype),
        name="Y",
    )
    return te.create_prim_func([x, y])


def cross_entropy(rows: int, length: int, dtype: str = "float32") -> Any:
    """``log(sum(exp(x))) - x[target]`` of each row."""
    wide = "float32"
    x = te.placeholder((rows, length), dtype, name="X")
    target = te.placeholder((rows,), "int32", name="T")
    k, n, p = (te.reduce_axis((0, length), name) for name in "knp")
    m = te.compute((rows,), lambda i: te.max(x[i, k].astype(wide), axis=k), name="m")
    s = te.compute((rows,), lambda i: te.sum(te.exp(x[i, n].astype(wide) - m[i]), axis=n), name="s")
    picked = te.compute(
        (rows,),
        lambda i: te.sum(
            tirx.if_then_else(tirx.EQ(p, target[i]), x[i, p].astype(wide), tirx.const(0.0, wide)),
            axis=p,
        ),
        name="picked",
    )
    loss = te.compute((rows,), lambda i: m[i] + te.log(s[i]) - picked[i], name="L")
    return te.create_prim_func([x, target, loss])


def variance(rows: int, length: int, dtype: str = "float32", wide: str = "float32") -> Any:
    """The mean of squares of what is left of a row without its mean."""
    x = te.placeholder((rows, length), dtype, name="X")
    k, n = (te.reduce_axis((0, length), name) for name in "kn")
    total = te.compute((rows,), lambda i: te.sum(x[i, k].astype(wide), axis=k), name="total")

    def square(i: Any) -> Any:
        apart = x[i, n].astype(wide) - total[i] / tirx.const(length, wide)
        return apart * apart

    m2 = te.compute((rows,), lambda i: te.sum(square(i), axis=n), name="m2")
    v = te.compute((rows,), lambda i: m2[i] / tirx.const(length, wide), name="V")
    return te.create_prim_func([x, v])


def layer_norm(rows: int, length: int, dtype: str = "float32", eps: float = 1e-5) -> Any:
    """Rows with mean 0 and variance 1, scaled and shifted."""
    wide = "float32"
    x = te.placeholder((rows, length), dtype, name="X")
    gamma = te.placeholder((length,), dtype, name="G")
    beta = te.placeholder((length,), dtype, name="B")
    k, n = (te.reduce_axis((0, length), name) for name in "kn")
    count = tirx.const(length, wide)
    total = te.compute((rows,), lambda i: te.sum(x[i, k].astype(wide), axis=k), name="total")

    def apart(i: Any, j: Any) -> Any:
        return x[i, j].astype(wide) - total[i] / count

    m2 = te.compute((rows,), lambda i: te.sum(apart(i, n) * apart(i, n), axis=n), name="m2")
    y = te.compute(
        (rows, length),
        lambda i, j: (
            apart(i, j) * te.rsqrt(m2[i] / count + tirx.const(eps, wide)) * gamma[j].astype(wide)
            + beta[j].astype(wide)
        ).astype(dtype),
        name="Y",
    )
    return te.create_prim_func([x, gamma, beta, y])


def inertia(bodies: int, points: int, dtype: str = "float32") -> Any:
    """The moment of inertia about the centre of mass: of masses and three coordinates each."""
    mass = te.placeholder((bodies, points), dtype, name="M")
    place = te.placeholder((bodies, points, 3), dtype, name="P")
    axes = [te.reduce_axis((0, points), f"k{i}") for i in range(5)]
    total = te.compute((bodies,), lambda b: te.sum(mass[b, axes[0]], axis=axes[0]), name="total")

    def moment(c: int) -> Any:
        k = axes[1 + c]
        return te.compute(
            (bodies,), lambda b: te.sum(mass[b, k] * place[b, k, c], axis=k), name=f"moment{c}"
        )

    moments = [moment(c) for c in range(3)]

    def about(b: Any, k: Any) -> Any:
        apart = [place[b, k, c] - moments[c][b] / total[b] for c in range(3)]
        return mass[b, k] * (apart[0] * apart[0] + apart[1] * apart[1] + apart[2] * apart[2])

    result = te.compute((bodies,), lambda b: te.sum(about(b, axes[4]), axis=axes[4]), name="I")
    return te.create_prim_func([mass, place, result])
