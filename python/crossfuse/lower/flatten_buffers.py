"""Flat buffers without TVM's wrong indices.

`FlattenBuffer` simplifies indices as maps of iterators (TVM 0.27, ``iter_map_simplify``). Where a
dividend has iterators and something that is none, a cluster's id or a constant for example, the
result may be wrong. The remainder of a sum is taken for the sum of a remainder::

    (id * 24 + threadIdx.x % 128) // 32
    (id * 24) // 32 + (threadIdx.x + id * 24 % 32) % 128 // 32        # wrong where % 128 wraps

and beside iterators that overlap, a constant is forgotten::

    (threadIdx.x // 8 * 4 + i + 17) // 32                             # i < 16
    (threadIdx.x // 8 * 4 + i) // 32

Such indices go through `FlattenBuffer` as arguments of a call, where iterator maps do not reach;
they are simplified afterwards by what else TVM knows of integers.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass

_CALL = "tirx.reinterpret"


def flatten_buffers() -> list[Any]:
    """Passes: `FlattenBuffer` between two that hide questionable indices from it and restore them.

    A function without such indices gets those of `FlattenBuffer` unchanged.
    """
    return [
        prim_func_pass("HideIndices", lambda func: _changed(func, _Hiding(func.body).index)),
        ir.tirx.transform.FlattenBuffer(),
        prim_func_pass("ShowIndices", _shown),
    ]


def _shown(func: Any) -> Any:
    """A function without the calls of `_Hiding`, of which most functions have none."""
    hidden = any(map(_is_hidden, ir.nodes(func.body, ir.Call)))
    return _changed(func, _Showing(func.body).index) if hidden else func


def _changed(func: Any, change: Any) -> Any:
    """A function with `change` applied to all indices; the same object if none differs."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = [change(each) for each in node.indices]
        if _same(indices, node.indices):
            return node
        return ir.tirx.BufferLoad(node.source, indices)

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = [change(each) for each in node.indices]
        if _same(indices, node.indices):
            return node
        return ir.BufferStore(node.buffer, node.value, indices)

    body = ir.mutate(func.body, (ir.TensorLoad, load), (ir.BufferStore, store))
    return func if body.same_as(func.body) else ir.with_body(func, body)


class _Iterators:
    """Ranges of the loop and thread variables of a function."""

    def __init__(self, body: Any) -> None:
        self.known = ir.sym.Analyzer()
        self.iterators: set[Any] = set()
        for loop in ir.nodes(body, ir.For):
            self._iterator(loop.loop_var, loop.min, loop.extent)
        for node in ir.nodes(body, ir.AttrStmt):
            if node.attr_key == "thread_extent":
                self._iterator(node.node.var, 0, node.value)

    def _iterator(self, var: Any, least: Any, extent: Any) -> None:
        if var not in self.iterators:
            self.iterators.add(var)
            self.known.bind(var, ir.tvm.ir.Range.from_min_extent(least, extent))


class _Hiding(_Iterators):
    def index(self, index: Any) -> Any:
        """The index, wrapped as the argument of a call if it is questionable."""
        if isinstance(index, (ir.tirx.IntImm, ir.Var)):
            return index
        divisions = ir.nodes(index, ir.tirx.FloorDiv, ir.tirx.FloorMod)
        if not any(self._is_padded(each.a) for each in divisions):
            return index
        return ir.Call(ir.Op.get(_CALL), [index], ret_ty=index.ty)

    def _is_padded(self, dividend: Any) -> bool:
        """Whether a dividend has iterators, and something beside them that is none."""
        terms = _terms(dividend)
        moving = [self._moves(each) for each in terms]
        return any(moving) and not (all(moving) and all(self._is_whole(each) for each in terms))

    def _moves(self, term: Any) -> bool:
        return any(each in self.iterators for each in ir.variables(term))

    def _is_whole(self, term: Any) -> bool:
        """Whether a term consists of iterators and constants only."""
        others = ir.nodes(term, ir.Call, ir.TensorLoad)
        return not others and all(each in self.iterators for each in ir.variables(term))


class _Showing(_Iterators):
    def index(self, index: Any) -> Any:
        """The index without the calls of `_Hiding`."""
        if isinstance(index, (ir.tirx.IntImm, ir.Var)):
            return index
        calls: list[Any] = []

        def show(node: Any, mutator: Any) -> Any:
            node = mutator.default_mutate(node)
            if not _is_hidden(node):
                return node
            calls.append(node)
            return node.args[0]

        shown = ir.mutate(index, (ir.Call, show))
        return self.known.simplify(shown) if calls else index


def _is_hidden(node: Any) -> bool:
    return bool(node.op.same_as(ir.Op.get(_CALL))) and str(node.ty) == str(node.args[0].ty)


def _terms(expression: Any) -> list[Any]:
    """Terms of a sum or difference, without zeros."""
    if isinstance(expression, (ir.tirx.Add, ir.tirx.Sub)):
        return [*_terms(expression.a), *_terms(expression.b)]
    return [] if ir.constant(expression) == 0 else [expression]


def _same(indices: list[Any], others: Any) -> bool:
    return all(one.same_as(other) for one, other in zip(indices, others, strict=True))
