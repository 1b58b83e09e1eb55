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
from crossfuse.workload.build import Elementwise, Form, Product, emit
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
    inner = form.first[0].columns if form.second else 0
    # A further operand of one column may be of an intermediate that has one, or the same for all.
    unclear = inner == 1 and bool(form.extras)
    if form.window or item > 2 or unclear or form.first[0].combine != "sum":
        return None
    step = TMA_PITCH // item
    left = _wide(form.left, step)
    width = math.ceil(inner / step) * step
    found = replace(
        form,
        left=left,
        first=tuple(_product(each, left.shape[1], width, step) for each in form.first),
        middle=form.middle and _zero_behind(form.middle, inner) if width > inner else form.middle,
        second=form.second and _product(form.second, width, 0, step),
        extras=tuple(_wide(e, step) if e.shape[-1] == inner else e for e in form.extras),
    )
    if _operands(found) == _operands(form):
        return None
    pairs = zip(_operands(form), _operands(found), strict=True)
    columns = (form.left.shape[-1], form.first[0].columns)
    return _noted(emit(found), [_passed(*each, stored) for each in pairs], columns)


def _operands(form: Form) -> tuple[Operand, ...]:
    products = (*form.first, *((form.second,) if form.second else ()))
    return (form.left, *(each.weight for each in products), *form.extras)


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


def _noted(func: tirx.PrimFunc, shapes: list[tuple[int, ...]], columns: tuple[int, int]) -> Any:
    """A function with the shapes of its inputs as callers pass them, and columns without zeros."""
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    root = sch.get_sblock("root")
    sch.annotate(root, UNPADDED, ";".join(",".join(map(str, shape)) for shape in shapes))
    sch.annotate(root, UNPADDED_COLUMNS, ",".join(map(str, columns)))
    (noted,) = sch.mod.functions.values()
    return noted
