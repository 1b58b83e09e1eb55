"""Writes blocks as an s_tir function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x * y,
    "max": lambda x, y: ir.tirx.max(x, y),
    "min": lambda x, y: ir.tirx.min(x, y),
}


def write_function(
    parameters: Sequence[Any], blocks: Sequence[Block], results: Sequence[Any], dtype: str
) -> Any:
    """A function of `parameters` that stores buffers `results`, which blocks of it write.

    All are buffers; `blocks` are in the order of their data, and `dtype` is that of loops.
    """
    tensors: dict[Any, Any] = {}
    for each in parameters:
        shape = _extents((int(extent) for extent in each.ty.shape), dtype)
        tensors[each] = te.placeholder(shape, str(each.ty.dtype), str(each.name))
    for block in blocks:
        tensors[block.buffer] = _computed(block, tensors, dtype)
    func = te.create_prim_func([tensors[each] for each in (*parameters, *results)])
    return func.with_attr("global_symbol", "main")


def _extents(shape: Any, dtype: str) -> list[Any]:
    return [ir.tirx.IntImm(dtype, int(each)) for each in shape]


def _computed(block: Block, tensors: Mapping[Any, Any], dtype: str) -> Any:
    zero = ir.tirx.IntImm(dtype, 0)
    axes = {
        var: te.reduce_axis((zero, ir.tirx.IntImm(dtype, block.domain[var])), str(var.name))
        for var in block.summed
    }

    def element(*places: Any) -> Any:
        images = dict(zip(block.coordinates, places, strict=True))
        images |= {var: axis.var for var, axis in axes.items()}
        (value,) = substituted([block.value], images)
        value = ir.mutate(value, (ir.TensorLoad, _reading(tensors)))
        return _reduced(block, value, list(axes.values())) if block.combine else value

    shape = _extents((block.domain[each] for each in block.coordinates), dtype)
    return te.compute(shape, element, name=str(block.buffer.name))


def _reading(tensors: Mapping[Any, Any]) -> Callable[[Any, Any], Any]:
    def read(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        return tensors[load.source](*load.indices)

    return read


def _reduced(block: Block, value: Any, axes: Sequence[Any]) -> Any:
    """A reduction; one from what the block starts from, which may be -inf or the least number."""
    operator = _OPERATORS[block.combine]
    reduce = te.comm_reducer(operator, lambda dtype: block.initial, block.combine)
    return reduce(value, axis=axes) if axes else operator(block.initial, value)


def substituted(expressions: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """Expressions with others in the place of variables, whatever the width of these."""
    images = {var: _as_wide(value, str(var.ty)) for var, value in values.items()}
    return [ir.substitute(each, images) for each in expressions]


def _as_wide(value: Any, dtype: str) -> Any:
    if str(value.ty) == dtype:
        return value
    number = ir.constant(value)
    return ir.tirx.Cast(dtype, value) if number is None else ir.tirx.IntImm(dtype, number)
