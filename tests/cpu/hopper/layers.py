"""Functions of layers of products, in the canonical form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from tvm import tirx

from crossfuse.workload.build import TIR, Elementwise, Form, Layer, Product, emit
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.expression import evaluate


def layered(rows: int, widths: Sequence[int], **options: Any) -> Any:
    """A function of layers; see `form`."""
    return emit(form(rows, widths, **options))


def form(
    rows: int,
    widths: Sequence[int],
    *,
    acts: Sequence[str] = ("relu", "silu", "gelu", "tanh"),
    dtype: str = "bfloat16",
    out: str = "",
    layout: str = "nk",
    bias: bool = True,
    residual: bool = False,
    gated: Sequence[int] = (),
) -> Form:
    """Layers from `widths[0]` columns to the last of them; activations take turns.

    `gated` layers have two products; `residual` adds a matrix to the output.
    """
    count = len(widths) - 1
    products: list[tuple[Product, ...]] = []
    extras: list[Operand] = []
    elements: list[Elementwise] = []
    for number, (depth, width) in enumerate(pairwise(widths)):
        shape = (width, depth) if layout == "nk" else (depth, width)
        names = [f"{number}{end}" for end in (("a", "b") if number in gated else ("",))]
        products.append(
            tuple(Product(f"gemm{e}", Operand(f"W{e}", shape, dtype), layout) for e in names)
        )
        added = f"bias{number}" if bias else ""
        extras += [Operand(added, (width,), dtype)] if bias else []
        act = "identity" if number == count - 1 else acts[number % len(acts)]
        elements.append(_element([f"gemm{e}" for e in names], added, act))
    if residual:
        extras.append(Operand("residual", (rows, widths[-1]), dtype))
        elements[-1] = _plus(elements[-1])
    inner = zip(products[1:-1], elements[1:-1], strict=True)
    return Form(
        Operand("A", (rows, widths[0]), dtype),
        products[0],
        elements[0],
        products[-1][0],
        elements[-1],
        tuple(extras),
        out or dtype,
        inner=tuple(Layer(*each) for each in inner),
    )


def _element(products: Sequence[str], bias: str, act: str) -> Elementwise:
    def element(tensors: Any, i: Any, j: Any) -> Any:
        value = tensors[products[0]](i, j)
        if bias:
            value = value + tensors[bias](j).astype("float32")
        value = evaluate(act, value, TIR)
        return value * tensors[products[1]](i, j) if products[1:] else value

    return element


def _plus(element: Callable[..., tirx.PrimExpr]) -> Elementwise:
    return lambda t, i, j: element(t, i, j) + t["residual"](i, j).astype("float32")
