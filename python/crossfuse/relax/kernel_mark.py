"""The mark of functions that our passes scheduled and that our lowering makes kernels of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.schema import parse

#: TVM's attribute of functions that no schedule is to be found for any more.
SCHEDULED = "tirx.is_scheduled"
#: Ours, of those of them that `crossfuse.relax.BuildKernels` is to build.
KERNEL = "crossfuse.kernel"
#: The plan that it was scheduled by, in JSON.
PLAN = "crossfuse.plan"
#: Of functions of Relax that compute a chain where no kernel does, and stay as they are.
REST = "crossfuse.rest"


def marked(func: Any) -> Any:
    """A scheduled function as a kernel of a module, which names it anew."""
    return func.without_attr("global_symbol").with_attr({SCHEDULED: True, KERNEL: True})


def is_kernel(func: Any) -> bool:
    """Whether `marked` was called on a function."""
    return isinstance(func, ir.PrimFunc) and bool(func.attrs) and KERNEL in func.attrs


def is_rest(function: Any) -> bool:
    """Whether a function of Relax is what is left of a chain that has kernels."""
    return bool(function.attrs) and REST in function.attrs


def with_plan(func: Any, plan: Mapping[str, Any]) -> Any:
    """A scheduled function that says by which plan; its library then says so too."""
    return func.with_attr(PLAN, json.dumps(plan, sort_keys=True))


def recorded(func: Any) -> dict[str, Any]:
    """What the library of a function is to record: its plan, if it says one."""
    text = (func.attrs or {}).get(PLAN)
    return {} if text is None else {"plan": parse(str(text))}
