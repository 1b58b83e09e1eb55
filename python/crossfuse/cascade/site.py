"""Sites: where a cascade stands in a function, with what its symbols read and its results write.

Expressions of TVM are over the site's own variables: `Site.rows`, `Site.axis`, and the columns of a
stage or an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse.cascade.spec import Cascade


@dataclass(frozen=True, eq=False)
class StageSite:
    """A stage in the function."""

    #: Name of its block.
    block: str
    #: The buffer that it writes.
    buffer: Any
    #: Loops of its result beyond the rows: the head dimension of attention, n of a product.
    columns: tuple[Any, ...]
    #: Type that the function accumulates in.
    dtype: str


@dataclass(frozen=True, eq=False)
class OutputSite:
    """An output buffer of the function and where a result is stored there."""

    #: The key in `Cascade.results` or `Cascade.rows`.
    name: str
    #: A parameter.
    buffer: Any
    #: Over rows, columns and (of `Cascade.rows`) the axis.
    indices: tuple[Any, ...]
    #: Loops beyond the rows and the axis; for ``topk`` the last stands for the place.
    columns: tuple[Any, ...]

    @property
    def dtype(self) -> str:
        """Type of what is stored."""
        return str(self.buffer.ty.dtype)


@dataclass(frozen=True, eq=False)
class Site:
    """A cascade in a function.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        The plain one, with a block for each operator.
    cascade : Cascade
        Its algebra.
    rows : tuple[tvm.tirx.Var, ...]
        Loops that all stages share.
    axis : tvm.tirx.Var
        The reduced loop.
    extents : Mapping[tvm.tirx.Var, int]
        Of rows, axis and columns.
    reads : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What each element and invariant stands for: usually one load, in the type of its buffer.
    stages : Mapping[str, StageSite]
        By name.
    outputs : tuple[OutputSite, ...]
        In the order of the function's parameters.
    producers : Mapping[sympy.Symbol, str]
        Elements that another reduction of the function makes (the scores of attention), with the
        name of its block; such a block reduces another axis, once for each element.
    after : crossfuse.cascade.rewrite.rows_first.RowsFirst | None
        The function that this one was cut from, with the product that follows; None of a whole.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> site = detect(func)[0]
    >>> len(site.cascade.stages)
    2
    """

    function: Any
    cascade: Cascade
    rows: tuple[Any, ...]
    axis: Any
    extents: Mapping[Any, int]
    reads: Mapping[sympy.Symbol, Any]
    stages: Mapping[str, StageSite]
    outputs: tuple[OutputSite, ...]
    producers: Mapping[sympy.Symbol, str]
    after: Any = None
