"""Keeps TVM's `FlattenBuffer` from wrong indices.

`FlattenBuffer` simplifies indices as maps of iterators. Where it pads a part of an iterator by what
is none, a cluster's id for example, it takes the remainder of the sum for the sum of the remainder
(TVM 0.27, ``iter_map_simplify``)::

    (id * 24 + threadIdx.x % 128) // 32
    (id * 24) // 32 + (threadIdx.x + id * 24 % 32) % 128 // 32        # wrong where % 128 wraps

Remainders in such dividends are written in ways that iterator maps do not look into: ``x & 127``,
or C's ``%`` of what is not negative.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass


def hide_splits() -> Any:
    """Pass: hide remainders in the indices of buffers, before `FlattenBuffer`.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass.
    """
    return prim_func_pass("HideSplits", lambda func: ir.with_body(func, _Hiding(func.body).run()))


class _Hiding:
    def __init__(self, body: Any) -> None:
        self.body = body
        self.known = ir.sym.Analyzer()
        self.iterators: set[Any] = set()
        ir.walk(body, (ir.For, self._loop), (ir.AttrStmt, self._threads))

    def run(self) -> Any:
        return ir.mutate(self.body, (ir.TensorLoad, self._load), (ir.BufferStore, self._store))

    def _loop(self, node: Any) -> None:
        self._iterator(node.loop_var, node.min, node.extent)

    def _threads(self, node: Any) -> None:
        if node.attr_key == "thread_extent":
            self._iterator(node.node.var, 0, node.value)

    def _iterator(self, var: Any, least: Any, extent: Any) -> None:
        if var not in self.iterators:
            self.iterators.add(var)
            self.known.bind(var, ir.tvm.ir.Range.from_min_extent(least, extent))

    def _load(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = [self._hidden(each) for each in node.indices]
        if _same(indices, node.indices):
            return node
        return ir.tirx.BufferLoad(node.source, indices)

    def _store(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = [self._hidden(each) for each in node.indices]
        if _same(indices, node.indices):
            return node
        return ir.BufferStore(node.buffer, node.value, indices)

    def _hidden(self, index: Any) -> Any:
        def divide(node: Any, mutator: Any) -> Any:
            if self._is_padded(node.a):
                a = ir.mutate(node.a, (ir.tirx.FloorMod, self._remainder))
                return type(node)(a, node.b)
            return mutator.default_mutate(node)

        return ir.mutate(index, (ir.tirx.FloorDiv, divide), (ir.tirx.FloorMod, divide))

    def _is_padded(self, dividend: Any) -> bool:
        """Whether something in it is no iterator."""
        calls: list[Any] = []
        ir.walk(dividend, (ir.Call, calls.append), (ir.TensorLoad, calls.append))
        return bool(calls) or any(each not in self.iterators for each in ir.variables(dividend))

    def _remainder(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        divisor = ir.constant(node.b)
        if divisor is None or not any(each in self.iterators for each in ir.variables(node.a)):
            return node
        if divisor & (divisor - 1) == 0:
            return ir.tirx.bitwise_and(node.a, divisor - 1)
        if self.known.can_prove_greater_equal(node.a, 0):
            return ir.tirx.truncmod(node.a, node.b)
        return node


def _same(indices: list[Any], others: Any) -> bool:
    return all(one.same_as(other) for one, other in zip(indices, others, strict=True))
