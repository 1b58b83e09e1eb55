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

    plain = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, ir.PrimFunc) and SCHEDULED in (func.attrs or {}):
            serial = serialise(func).with_attr("global_symbol", name.name_hint)
            plain.update_func(name, _in_block(serial))
    return plain


def _in_block(func: Any) -> Any:
    """A function whose body is a block, which Relax looks at when it searches for reshapes."""
    root = ir.SBlock([], [], [], "root", func.body)
    return func.with_body(ir.SBlockRealize([], True, root))
