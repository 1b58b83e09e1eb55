"""Keeps TVM's `ThreadSync` from taking equal indices for one thread.

`ThreadSync` leaves out a ``__syncthreads`` where a store and a load of shared memory have the same
index: it takes them for the same thread. That holds only if no two threads share an index::

    for k in range(16):
        if threadIdx.y < 1:
            S[threadIdx.x] = D[k, threadIdx.x]
        acc += S[threadIdx.x]          # with threadIdx.y = 1: another thread stored it

Where threads share an index, loads get it by way of another type, which `ThreadSync` does not see
through; `trust_again` takes that away.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass, was_lowered

_DETOUR = "int64"


def distrust_equal_indices() -> Any:
    """Pass: hide indices of loads of shared memory that several threads have, before `ThreadSync`.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; functions without our marks are not looked at.
    """

    def transform(func: Any) -> Any:
        return ir.with_body(func, _Hiding().run(func.body)) if was_lowered(func) else func

    return prim_func_pass("DistrustEqualIndices", transform)


def trust_again(func: Any) -> Any:
    """Give loads their indices back.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A function after `ThreadSync`.

    Returns
    -------
    tvm.tirx.PrimFunc
        The same loads as before `distrust_equal_indices`.
    """

    def plain(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        if not _is_shared(load.source):
            return load
        return ir.tirx.BufferLoad(load.source, [_seen(each) for each in load.indices])

    return ir.with_body(func, ir.mutate(func.body, (ir.TensorLoad, plain)))


class _Hiding:
    def __init__(self) -> None:
        self.threads: dict[Any, int] = {}

    def run(self, body: Any) -> Any:
        ir.walk(body, (ir.AttrStmt, self._enter))
        return ir.mutate(body, (ir.TensorLoad, self._load)) if self.threads else body

    def _enter(self, node: Any) -> None:
        if node.attr_key != "thread_extent" or not node.node.thread_tag.startswith("threadIdx"):
            return
        extent = ir.constant(node.value)
        if extent is not None and extent > 1:
            self.threads[node.node.var] = int(extent)

    def _load(self, load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        if not _is_shared(load.source) or self._is_of_one_thread(load.indices):
            return load
        return ir.tirx.BufferLoad(load.source, [_hidden(each) for each in load.indices])

    def _is_of_one_thread(self, indices: Any) -> bool:
        """Whether no two threads have this index: it is linear, with steps wide enough."""
        (index,) = indices
        if ir.tvm.DataType(str(index.ty)).lanes != 1:
            return False
        found = ir.sym.detect_linear_equation(index, list(self.threads))
        if not len(found):
            return False
        constants = [ir.constant(each) for each in list(found)[:-1]]
        steps = [abs(each) for each in constants if each is not None]
        if len(steps) < len(constants):
            return False
        reach = 0  # of the threads so far
        for step, extent in sorted(zip(steps, self.threads.values(), strict=True)):
            if step <= reach:
                return False
            reach += step * (extent - 1)
        return True


def _is_shared(buffer: Any) -> bool:
    return ir.is_buffer_var(buffer) and str(buffer.scope()) in ("shared", "shared.dyn")


def _hidden(index: Any) -> Any:
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(_hidden(index.base), index.stride, index.lanes)
    if ir.tvm.DataType(str(index.ty)).lanes != 1:
        return index
    return ir.tirx.Cast(str(index.ty), ir.tirx.Cast(_DETOUR, index))


def _seen(index: Any) -> Any:
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(_seen(index.base), index.stride, index.lanes)
    inner = index.value if isinstance(index, ir.tirx.Cast) else None
    return inner.value if isinstance(inner, ir.tirx.Cast) and str(inner.ty) == _DETOUR else index
