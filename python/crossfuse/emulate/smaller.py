"""Functions whose arguments are smaller than the function's own: fewer rows, or shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import BufferSpec


def in_block(func: Any, params: Any, body: Any, buffers: Any = ()) -> Any:
    """A function whose body is a block, as Relax expects when it searches for reshapes."""
    root = ir.SBlock([], [], [], "root", body, alloc_buffers=list(buffers))
    return ir.PrimFunc(params, ir.SBlockRealize([], True, root), func.ret_type, func.attrs)


def of_shapes(
    func: Any, specs: Sequence[BufferSpec], shapes: Sequence[tuple[Any, ...]], beyond: float
) -> Any:
    """A function of arguments of smaller shapes, which are padded with the number `beyond`."""
    params, inner, before, after = [], [], [], []
    for spec, shape, param in zip(specs, shapes, func.params, strict=True):
        if all(map(_same, shape, param.ty.shape)):
            params.append(param)
            continue
        inner.append(param)
        params.append(ir.tirx.decl_buffer(list(shape), spec.dtype, spec.name))
        if spec.output:
            after.append(_stored(params[-1], param, shape))
        else:
            before.append(_loaded(param, params[-1], shape, beyond))
    return in_block(func, params, ir.SeqStmt([*before, func.body, *after]), inner)


def _same(extent: Any, other: Any) -> bool:
    return ir.constant(extent) is not None and ir.constant(extent) == ir.constant(other)


def _inside(index: Sequence[Any], shape: Sequence[Any]) -> Any:
    return ir.tirx.all(*(each < extent for each, extent in zip(index, shape, strict=True)))


def _loaded(inner: Any, outer: Any, shape: Sequence[Any], beyond: float) -> Any:
    """Fill a tensor from a smaller one, padding it."""

    def statement(index: list[Any]) -> Any:
        nothing = ir.tirx.const(beyond, "float32").astype(inner.ty.dtype)
        value = ir.tirx.if_then_else(_inside(index, shape), outer[tuple(index)], nothing)
        return ir.BufferStore(inner, value, index)

    return _over(inner, statement)


def _stored(outer: Any, inner: Any, shape: Sequence[Any]) -> Any:
    """Store the part of a tensor that fits a smaller one."""

    def statement(index: list[Any]) -> Any:
        store = ir.BufferStore(outer, inner[tuple(index)], index)
        return ir.IfThenElse(_inside(index, shape), store, None)

    return _over(inner, statement)


def _over(buffer: Any, statement: Callable[[list[Any]], Any]) -> Any:
    """Loops over all elements of a tensor."""
    index = [ir.tirx.Var(f"i{axis}", "int64") for axis in range(len(buffer.ty.shape))]
    body = statement(index)
    for variable, extent in reversed(list(zip(index, buffer.ty.shape, strict=True))):
        body = ir.For(variable, 0, extent.astype("int64"), ir.ForKind.SERIAL, body)
    return body
