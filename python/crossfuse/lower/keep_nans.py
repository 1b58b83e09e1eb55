"""Element-wise maxima and minima of floats as operators that are NaN where an operand is.

Chains, cascades and models are read and rewritten with TVM's own `Max` and `Min`. Before they
become loops or instructions, those that are no step of a reduction are replaced: see
`crossfuse.lower.extremes`. A reduction's own stay, in words and in instructions.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.extremes import MAXIMUM, MINIMUM, extreme
from crossfuse.lower.nan_kinds import Kind, Kinds
from crossfuse.workload.dtypes import is_float

#: Attribute of functions that are done.
KEPT = "crossfuse.keeps_nans"
_NAMES = {ir.tirx.Max: MAXIMUM, ir.tirx.Min: MINIMUM}


def keep_nans(func: Any) -> Any:
    """Let element-wise maxima and minima of a function be NaN where an operand is.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Any function, before its vectors are made.

    Returns
    -------
    tvm.tirx.PrimFunc
        The function itself if there are none. What only numbers go into stays, and so does what
        updates or reads the extreme of a reduction, which is a number.
    """
    if KEPT in (func.attrs or {}) or not _has_extremes(func.body):
        return func
    body = _Rewriter(Kinds(func)).rewritten(func.body)
    return ir.with_body(func, body).with_attr(KEPT, True)


def _has_extremes(body: Any) -> bool:
    found: list[Any] = []
    ir.walk(body, *((each, found.append) for each in _NAMES))
    return any(is_float(str(each.ty)) for each in found)


class _Rewriter:
    """Replaces element-wise maxima and minima of one function."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._buffer: Any = None

    def rewritten(self, body: Any) -> Any:
        return ir.mutate(
            body,
            (ir.BufferStore, self._store),
            (ir.tirx.Cast, self._cast),
            *((each, self._extreme) for each in _NAMES),
        )

    def _store(self, node: Any, mutator: Any) -> Any:
        outer, self._buffer = self._buffer, node.buffer
        node = mutator.default_mutate(node)
        self._buffer = outer
        return node

    def _cast(self, node: Any, mutator: Any) -> Any:
        # Of what becomes an integer NaN has no meaning, and places must stay in their tensor.
        return mutator.default_mutate(node) if is_float(str(node.ty)) else node

    def _extreme(self, node: Any, mutator: Any) -> Any:
        if not is_float(str(node.ty)):
            return mutator.default_mutate(node)
        kinds = self._kinds
        if kinds.reduces(node, self._buffer) or kinds.of(node) >= Kind.NUMBER:
            # What a step chooses among is the same as where else it is made, to be made once.
            return mutator.default_mutate(node)
        return extreme(_NAMES[type(node)], mutator.mutate(node.a), mutator.mutate(node.b))
