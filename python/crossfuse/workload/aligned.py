"""Forms with operands padded so that rows begin on multiples of 16 bytes, which TMA needs.

Of a chain of extents such as 65 and 131, operands are copied to rows of 72 and 136, with zeros at
the ends, and products sum over as many elements. The output keeps its columns.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from tvm import tirx

from crossfuse.hardware import TMA_PITCH
from crossfuse.markers import UNPADDED, UNPADDED_COLUMNS
from crossfuse.workload.build import Elementwise, Form, Layer, Product, emit
from crossfuse.workload.dtypes import Operand, float_type


def aligned(form: Form, stored: Container[str] = ()) -> tirx.PrimFunc | None:
    """The function of a form on padded operands; None if there is nothing to pad for TMA.

    Its root block is annotated with the shapes that callers pass, see
    `crossfuse.lower.padded_rows`: operands that are `stored` by name come with zeros at the ends of
    their rows, such as weights that were padded once; the others are copied in each call.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> from crossfuse.workload.build import form_of
    >>> func = aligned(form_of(parse("gemm:M=16,K=65,N=131,dtype=bfloat16")))
    >>> [tuple(map(int, each.ty.shape)) for each in func.params]
    [(16, 72), (72, 136), (16, 131)]
    """
    item = float_type(form.left.dtype).numpy.itemsize
    inner = form.columns[1:] if form.second else ()
    # A further operand of one column may be of an intermediate that has one, or the same for all.
    unclear = 1 in inner and bool(form.extras)
    if form.window or item > 2 or unclear or form.first[0].combine != "sum":
        return None
    step = TMA_PITCH // item
    left = _wide(form.left, step)
    # Columns of the input and of each intermediate, with those that are padding.
    depths = (left.shape[1], *(math.ceil(each / step) * step for each in inner), 0)
    middle, between = form.middle, tuple(each.element for each in form.inner)
    elements = [
        made and (_zero_behind(made, columns) if width > columns else made)
        for made, columns, width in zip((middle, *between), inner, depths[1:], strict=False)
    ]
    layers = zip(form.inner, elements[1:], depths[1:], depths[2:], strict=False)
    found = replace(
        form,
        left=left,
        first=tuple(_product(each, depths[0], depths[1], step) for each in form.first),
        middle=elements[0] if elements else None,
        inner=tuple(
            Layer(tuple(_product(each, depth, width, step) for each in layer.products), made)
            for layer, made, depth, width in layers
            if made
        ),
        second=form.second and _product(form.second, depths[-2], 0, step),
        extras=tuple(_wide(e, step) if e.shape[-1] in inner else e for e in form.extras),
    )
    if found.operands == form.operands:
        return None
    pairs = zip(form.operands, found.operands, strict=True)
    return _noted(emit(found), [_passed(*each, stored) for each in pairs], form.columns)


def _passed(short: Operand, wide: Operand, stored: Container[str]) -> tuple[int, ...]:
    """The shape that callers pass: never of more rows, since TMA loads zeros behind the last."""
    return (*short.shape[:-1], wide.shape[-1]) if short.name in stored else short.shape


def _wide(operand: Operand, step: int) -> Operand:
    """An operand with rows padded to a multiple of `step` elements."""
    *outer, inner = operand.shape
    return replace(operand, shape=(*outer, math.ceil(inner / step) * step))


def _product(product: Product, depth: int, width: int, step: int) -> Product:
    """A product that sums over `depth` elements of wider rows; `width` 0 keeps its columns."""
    weight, width = _wide(product.weight, step), width or product.columns
    rows = depth if product.layout == "kn" else width
    weight = replace(weight, shape=(rows, weight.shape[1]))
    return replace(product, weight=weight, width=width)


def _zero_behind(middle: Elementwise, columns: int) -> Elementwise:
    """An intermediate whose padding columns are zero, whatever its row holds.

    An infinite input times the zeros of a weight would be NaN, and NaN times zero is NaN again.
    """

    def element(tensors: Mapping[str, Any], i: Any, j: Any) -> Any:
        return tirx.if_then_else(j < columns, middle(tensors, i, j), tirx.const(0, "float32"))

    return element


def _noted(func: tirx.PrimFunc, shapes: list[tuple[int, ...]], columns: tuple[int, ...]) -> Any:
    """A function with the shapes of its inputs as callers pass them, and columns without zeros."""
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    root = sch.get_sblock("root")
    sch.annotate(root, UNPADDED, ";".join(",".join(map(str, shape)) for shape in shapes))
    sch.annotate(root, UNPADDED_COLUMNS, ",".join(map(str, columns)))
    (noted,) = sch.mod.functions.values()
    return noted
