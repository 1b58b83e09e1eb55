"""Forms whose operands have rows that begin on multiples of 16 bytes, as TMA copies them.

Of a chain of extents such as 65 and 131, operands are copied to rows of 72 and 136. The first
products sum over as many elements, with zeros at the ends. The intermediate and the output keep
their columns: an infinite input times the zeros of more of them would be no number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tvm import tirx

from crossfuse.hardware import TMA_PITCH
from crossfuse.markers import UNPADDED
from crossfuse.workload.build import Form, Product, emit
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.operand import Operand


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
    [(16, 72), (72, 136), (16, 131)]
    """
    item = float_type(form.left.dtype).numpy.itemsize
    products = (*form.first, *((form.second,) if form.second else ()))
    if form.window or item > 2 or any(each.combine != "sum" for each in products):
        return None
    step = TMA_PITCH // item
    left = _wide(form.left, step)
    found = replace(
        form,
        left=left,
        first=tuple(_product(each, left.shape[1], step) for each in form.first),
        second=form.second and _product(form.second, 0, step),
    )
    if _operands(found) == _operands(form):
        return None
    return _noted(emit(found), [each.shape for each in _operands(form)])


def _operands(form: Form) -> tuple[Operand, ...]:
    products = (*form.first, *((form.second,) if form.second else ()))
    return (form.left, *(each.weight for each in products), *form.extras)


def _wide(operand: Operand, step: int) -> Operand:
    """An operand with rows of a multiple of so many elements."""
    *outer, inner = operand.shape
    return replace(operand, shape=(*outer, math.ceil(inner / step) * step))


def _product(product: Product, depth: int, step: int) -> Product:
    """The same columns by a weight with wider rows, with more of them if it sums over more."""
    weight = _wide(product.weight, step)
    if depth and product.layout == "kn":
        weight = replace(weight, shape=(depth, weight.shape[1]))
    return replace(product, weight=weight, width=product.columns)


def _noted(func: tirx.PrimFunc, shapes: list[tuple[int, ...]]) -> Any:
    """A function with the shapes of its inputs as callers pass them."""
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    text = ";".join(",".join(map(str, shape)) for shape in shapes)
    sch.annotate(sch.get_sblock("root"), UNPADDED, text)
    (noted,) = sch.mod.functions.values()
    return noted
