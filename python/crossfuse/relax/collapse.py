"""Tensors of any rank as matrices: leading extents are joined to rows."""

from __future__ import annotations

import math

from tvm.ir import Var

from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import RESHAPES, TRANSPOSE, refused, shape_of


def collapse(shape: tuple[int, ...], rows: int, where: str) -> tuple[int, ...]:
    """Join the leading extents to rows; drop them where the value is the same for all rows.

    Parameters
    ----------
    shape : tuple[int, ...]
        Of a tensor that takes part in element-wise operators.
    rows : int
        Rows of the model's input.
    where : str
        What has the shape, for the message.

    Returns
    -------
    tuple[int, ...]
        ``(rows, columns)`` or ``(columns,)``.

    Raises
    ------
    WorkloadRefused
        For tensors with a value for some rows but not all.
    """
    *leading, columns = shape or (1,)
    if len(shape) > 1 and math.prod(leading) == rows:
        return (rows, columns)
    if math.prod(leading) == 1:
        return (columns,)
    limit = f"one value per column, or one for each of the {rows} rows"
    raise refused(where, f"the shape {list(shape)}", limit, "broadcast it to all rows beforehand")


def same_matrix(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether two shapes differ at most in leading ones."""
    return _squeezed(left) == _squeezed(right)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 0 and shape[0] == 1:
        shape = shape[1:]
    return shape


def check_reshape(graph: Graph, value: Var, rows: int) -> None:
    """Refuse a reshape unless it only regroups rows, a broadcast unless it only repeats them.

    Parameters
    ----------
    graph : Graph
        The model.
    value : Var
        A bound variable; other operators than reshapes and transpositions pass.
    rows : int
        Rows of the model's input.

    Raises
    ------
    WorkloadRefused
        Naming both shapes.
    """
    name = graph.operator(value)
    if name not in RESHAPES and name != TRANSPOSE:
        return
    shape, source = shape_of(value, name), shape_of(graph.calls[value].args[0], name)
    if name == TRANSPOSE:
        axes = graph.calls[value].attrs.axes
        if axes is None or [int(axis) for axis in axes] != list(range(len(shape))):
            found, limit = f"a transposition of {list(source)}", "rows that stay rows"
            raise refused(name, found, limit, "transpose outside the graph")
    before, after = (collapse(extents, rows, name) for extents in (source, shape))
    repeats = name == "relax.broadcast_to" and _broadcasts(before, after)
    if not repeats and not same_matrix(before, after):
        limit = "reshapes that regroup rows without touching columns"
        advice = "reshape outside the graph"
        raise refused(name, f"{list(source)} to {list(shape)}", limit, advice)


def _broadcasts(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    pairs = zip(reversed(before), reversed(after), strict=False)
    return len(before) <= len(after) and all(b in (1, a) for b, a in pairs)
