"""Scheduled functions of a module as sequential ones, so that it runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.relax.kernel_mark import SCHEDULED

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec


def serial_kernels(mod: Any) -> Any:
    """Replace functions that are bound to a GPU's threads by loops that compute the same.

    Parameters
    ----------
    mod : tvm.IRModule
        With functions that `crossfuse.relax.FuseChains` or `FuseCascades` scheduled.

    Returns
    -------
    tvm.IRModule
        To be built for LLVM; the given one is as before.
    """
    from crossfuse.emulate.serialise import serialise
    from crossfuse.lower.extract import buffer_specs
    from crossfuse.lower.hopper import takes_fewer_rows

    plain = mod.clone()
    for name, func in mod.functions_items():
        if not isinstance(func, ir.PrimFunc):
            continue
        if SCHEDULED not in (func.attrs or {}):
            plain.update_func(name, ir.mutate(func, (ir.AttrStmt, _without_scope)))
        else:
            serial = serialise(func).with_attr("global_symbol", name.name_hint)
            if takes_fewer_rows(func):
                plain.update_func(name, _fewer_rows(serial, buffer_specs(func)))
            else:
                plain.update_func(name, _in_block(serial, serial.params, serial.body))
    return plain


def _without_scope(statement: Any, mutator: Any) -> Any:
    """Drop a mark of TVM's scatters that its code generator for LLVM does not know, and says so."""
    if str(statement.attr_key) == "pragma_scope":
        return mutator.mutate(statement.body)
    return mutator.default_mutate(statement)


def _in_block(func: Any, params: Any, body: Any, buffers: Any = ()) -> Any:
    """A function whose body is a block, which Relax looks at when it searches for reshapes."""
    root = ir.SBlock([], [], [], "root", body, alloc_buffers=list(buffers))
    return ir.PrimFunc(params, ir.SBlockRealize([], True, root), func.ret_type, func.attrs)


def _fewer_rows(func: Any, specs: Sequence[BufferSpec]) -> Any:
    """A function of any number of rows up to its own, of which it computes all.

    NaNs take the place of those that are not there: a row that needs another one shows it.
    """
    rows = ir.tirx.Var("rows", "int64")
    params, inner, before, after = [], [], [], []
    for spec, param in zip(specs, func.params, strict=True):
        if not spec.rows:
            params.append(param)
            continue
        inner.append(param)
        params.append(ir.tirx.decl_buffer([rows, *spec.shape[1:]], spec.dtype, spec.name))
        if spec.output:
            after.append(_stored(params[-1], param, rows))
        else:
            before.append(_loaded(param, params[-1], rows))
    return _in_block(func, params, ir.SeqStmt([*before, func.body, *after]), inner)


def _loaded(inner: Any, outer: Any, rows: Any) -> Any:
    """Fill a tensor of all rows."""

    def statement(index: list[Any]) -> Any:
        nothing = ir.tirx.const(float("nan"), "float32").astype(inner.ty.dtype)
        value = ir.tirx.if_then_else(index[0] < rows, outer[tuple(index)], nothing)
        return ir.BufferStore(inner, value, index)

    return _over(inner, statement)


def _stored(outer: Any, inner: Any, rows: Any) -> Any:
    """Store the rows that there are."""

    def statement(index: list[Any]) -> Any:
        store = ir.BufferStore(outer, inner[tuple(index)], index)
        return ir.IfThenElse(index[0] < rows, store, None)

    return _over(inner, statement)


def _over(buffer: Any, statement: Callable[[list[Any]], Any]) -> Any:
    """Loops over all elements of a tensor."""
    index = [ir.tirx.Var(f"i{axis}", "int64") for axis in range(len(buffer.ty.shape))]
    body = statement(index)
    for variable, extent in reversed(list(zip(index, buffer.ty.shape, strict=True))):
        body = ir.For(variable, 0, extent.astype("int64"), ir.ForKind.SERIAL, body)
    return body
