"""Products whose left operand is made row by row, scheduled as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.rows_first import RowsFirst, rows_first
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.schedule.rules.rows import schedule_rows_gemm
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve

EPSILON = 1e-5


def spec(tokens: int, depth: int, columns: int) -> CascadeSpec:
    """A packaged norm and its product."""
    return resolve(f"rmsnorm_gemm:tokens={tokens},K={depth},N={columns}")


def scheduled(
    function: Any,
    stream: StreamTiles | None = None,
    constant: bool = False,
    chunk: int = 0,
    **tiles: int,
) -> Any:
    """A function of rows and their product as one kernel; early with `constant` weights."""
    parts = rows_first(function)
    assert isinstance(parts, RowsFirst)
    (site,) = detect(parts.rows)
    derivation = derive(site.cascade)
    return schedule_rows_gemm(
        parts,
        site,
        derivation,
        tiles=TensorTiles(**tiles),
        stream=stream,
        chunk=chunk,
        constant_weights=constant,
    )


def quantised(tokens: int, depth: int, columns: int) -> CascadeSpec:
    """A packaged quantisation of rows, and its product of 8-bit floats."""
    return resolve(f"quant_gemm:tokens={tokens},K={depth},N={columns}")


def of_spec(given: CascadeSpec, constant: bool = False, **tiles: int) -> Any:
    """A packaged one."""
    return scheduled(prim_func(given), constant=constant, **tiles)


#: Two warpgroups multiply these, with sums that leave room for one that makes rows.
TILES = {"rows": 128, "columns": 192}
#: Norms whose products begin with raw rows, and their tiles: CTAs alone and in pairs, with one row
#: each, with two, and with none.
HEADS: dict[str, tuple[CascadeSpec, dict[str, int]]] = {
    "a tile without rows": (spec(8, 1024, 384), TILES | {"cluster": 2}),
    "one CTA a cluster": (spec(3, 1024, 576), TILES | {"cluster": 1}),
    "whole tiles": (spec(128, 576, 4096), {"rows": 128, "columns": 64, "cluster": 1}),
    "odd rows and columns": (spec(3, 520, 480), {"rows": 128, "columns": 160, "cluster": 2}),
}


#: An element of a norm, of that of x, the row's factor, and the gain of its column.
Element = Callable[[Any, Any, Any], Any]


def norm_gemm(
    tokens: int, depth: int, columns: int, element: Element, dtype: str = "bfloat16"
) -> Any:
    """A norm by the root of the mean square, whose elements `element` makes, and a product."""
    x, weight = (
        te.placeholder(shape, dtype, name)
        for name, shape in (("x", (tokens, depth)), ("weight", (columns, depth)))
    )
    gain = te.placeholder((depth,), dtype, "gain")
    j, k = (te.reduce_axis((0, depth), name) for name in ("j", "k"))
    squares = te.compute(
        (tokens,),
        lambda i: te.sum(x[i, j].astype("float32") * x[i, j].astype("float32"), axis=j),
        "squares",
    )

    def normal(i: Any, j: Any) -> Any:
        factor = tirx.rsqrt(squares[i] / float(depth) + tirx.const(EPSILON, "float32"))
        return element(x[i, j].astype("float32"), factor, gain[j].astype("float32")).astype(dtype)

    normalised = te.compute(x.shape, normal, "normalised")
    product = te.compute(
        (tokens, columns),
        lambda i, n: te.sum(
            normalised[i, k].astype("float32") * weight[n, k].astype("float32"), axis=k
        ),
        "product",
    )
    out = te.compute(product.shape, lambda i, n: product[i, n].astype(dtype), "out")
    return te.create_prim_func([x, gain, weight, out])


def layernorm_gemm(tokens: int, depth: int, columns: int, dtype: str = "bfloat16") -> Any:
    """A layer norm with gain and bias, the product with weights, and the product's bias."""
    x, weight = (
        te.placeholder(shape, dtype, name)
        for name, shape in (("x", (tokens, depth)), ("weight", (columns, depth)))
    )
    gain, shift = (te.placeholder((depth,), dtype, name) for name in ("gain", "shift"))
    bias = te.placeholder((columns,), "float32", "bias")
    j, again, k = (te.reduce_axis((0, depth), name) for name in ("j", "again", "k"))

    def wide(value: Any) -> Any:
        return value.astype("float32")

    total = te.compute((tokens,), lambda i: te.sum(wide(x[i, j]), axis=j), "total")
    mean = te.compute((tokens,), lambda i: total[i] / float(depth), "mean")
    apart = te.compute(x.shape, lambda i, j: wide(x[i, j]) - mean[i], "apart")
    spread = te.compute(
        (tokens,), lambda i: te.sum(apart[i, again] * apart[i, again], axis=again), "spread"
    )

    def normal(i: Any, j: Any) -> Any:
        scale = tirx.rsqrt(spread[i] / float(depth) + tirx.const(EPSILON, "float32"))
        return (apart[i, j] * scale * wide(gain[j]) + wide(shift[j])).astype(dtype)

    normalised = te.compute(x.shape, normal, "normalised")
    product = te.compute(
        (tokens, columns),
        lambda i, n: te.sum(wide(normalised[i, k]) * wide(weight[n, k]), axis=k),
        "product",
    )
    out = te.compute(product.shape, lambda i, n: (product[i, n] + bias[n]).astype(dtype), "out")
    return te.create_prim_func([x, gain, shift, weight, bias, out])


def layernorm_reference(inputs: dict[str, np.ndarray], rounded: bool = True) -> np.ndarray:
    """`layernorm_gemm` in float64, its left operand rounded as the function rounds it."""
    wide = {name: each.astype(np.float64) for name, each in inputs.items()}
    apart = wide["x"] - wide["x"].mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((apart**2).mean(axis=1, keepdims=True) + EPSILON)
    left = apart * scale * wide["gain"] + wide["shift"]
    if rounded:
        left = left.astype(inputs["x"].dtype).astype(np.float64)
    return left @ wide["weight"].T + wide["bias"]
