"""Forms whose operands have rows that begin on multiples of 16 bytes, as TMA copies them.

Of a chain of extents such as 65 and 131, operands are copied to rows of 72 and 136. What is summed
over, and the columns of the output, are then as many, with zeros at the end of the operands. The
intermediate keeps its columns: of more of them an infinite input would make numbers that are none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tvm import tirx

from crossfuse.markers import UNPADDED
from crossfuse.workload.build import Form, Product, emit
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.operand import Operand

#: Bytes that rows of a tensor map begin on multiples of (CUDA driver API, ``cuTensorMapEncode``).
PITCH = 16


def aligned(form: Form) -> tirx.PrimFunc | None:
    """The function of a form on padded operands, where the form's own rows are not aligned.

    Parameters
    ----------
    form : Form
        A chain or a product of matrices.

    Returns
    -------
    tvm.tirx.PrimFunc | None
        Its root block is annotated with the shapes that callers pass, see
        `crossfuse.lower.padded_rows`. None if there is nothing to pad for TMA.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> from crossfuse.workload.build import form_of
    >>> func = aligned(form_of(parse("gemm:M=16,K=65,N=131,dtype=bfloat16")))
    >>> [tuple(map(int, each.ty.shape)) for each in func.params]
    [(16, 72), (72, 136), (16, 136)]
    """
    item = float_type(form.left.dtype).numpy.itemsize
    last = form.second or form.first[-1]
    if form.window or item > 2 or last.combine != "sum" or last.columns == 1:
        return None
    step = PITCH // item
    padded = _padded(form, last, step)
    if padded is None:
        return None
    shapes = [*(each.shape for each in _operands(form)), (form.left.shape[0], last.columns)]
    return _noted(emit(padded), shapes)


def _operands(form: Form) -> tuple[Operand, ...]:
    products = (*form.first, *((form.second,) if form.second else ()))
    return (form.left, *(each.weight for each in products), *form.extras)


def _padded(form: Form, last: Product, step: int) -> Form | None:
    """The form with rows of multiples of `step` elements; None if it has them."""
    width = last.columns

    def rows(operand: Operand) -> Operand:
        *outer, inner = operand.shape
        return replace(operand, shape=(*outer, math.ceil(inner / step) * step))

    def product(each: Product) -> Product:
        weight = rows(each.weight)
        if each is not last:
            return replace(each, weight=weight, width=each.columns)
        if each.layout == "nk":  # the output's columns are rows of the weight
            weight = replace(weight, shape=(math.ceil(width / step) * step, weight.shape[1]))
        return replace(each, weight=weight)

    depth = rows(form.left).shape[1]
    first = tuple(_deeper(product(each), depth) for each in form.first)
    second = form.second and product(form.second)
    extras = tuple(rows(each) if each.shape[-1] == width else each for each in form.extras)
    found = replace(form, left=rows(form.left), first=first, second=second, extras=extras)
    return None if _operands(found) == _operands(form) else found


def _deeper(product: Product, depth: int) -> Product:
    """A product of which the weight has as many rows as the padded left operand has columns."""
    if product.layout == "nk":
        return product
    weight = replace(product.weight, shape=(depth, product.weight.shape[1]))
    return replace(product, weight=weight)


def _noted(func: tirx.PrimFunc, shapes: list[tuple[int, ...]]) -> Any:
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    text = ";".join(",".join(map(str, shape)) for shape in shapes)
    sch.annotate(sch.get_sblock("root"), UNPADDED, text)
    (noted,) = sch.mod.functions.values()
    return noted
