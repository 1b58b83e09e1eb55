"""The mark of functions that our passes scheduled and that our lowering makes kernels of."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir

#: TVM's attribute of functions that no schedule is to be found for any more.
SCHEDULED = "tirx.is_scheduled"
#: Ours, of those of them that `crossfuse.relax.BuildKernels` is to build.
KERNEL = "crossfuse.kernel"


def marked(func: Any) -> Any:
    """A scheduled function as a kernel of a module, which names it anew."""
    return func.without_attr("global_symbol").with_attr({SCHEDULED: True, KERNEL: True})


def is_kernel(func: Any) -> bool:
    """Whether `marked` was called on a function."""
    return isinstance(func, ir.PrimFunc) and bool(func.attrs) and KERNEL in func.attrs
