"""Scheduled functions of a module as sequential ones, so that it runs without a GPU."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.relax.kernel_mark import SCHEDULED


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
    from crossfuse.emulate.smaller import in_block, of_shapes
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
                specs = buffer_specs(func)
                # A row that needs another one, which is not there, shows it.
                rows = ir.tirx.Var("rows", "int64")
                shapes = [(rows, *each.shape[1:]) if each.rows else each.shape for each in specs]
                plain.update_func(name, of_shapes(serial, specs, shapes, float("nan")))
            else:
                plain.update_func(name, in_block(serial, serial.params, serial.body))
    return plain


def _without_scope(statement: Any, mutator: Any) -> Any:
    """Drop a mark of TVM's scatters that its code generator for LLVM does not know, and says so."""
    if str(statement.attr_key) == "pragma_scope":
        return mutator.mutate(statement.body)
    return mutator.default_mutate(statement)
