"""Functions of workloads, gradients among them."""

from __future__ import annotations

from typing import Any

from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import RowsGradient


def function_of(spec: CascadeSpec) -> Any:
    """The unscheduled s_tir function of a cascade; that of a gradient is derived.

    Its parameters are the spec's operands in order, then the outputs.
    """
    from crossfuse.autodiff.differentiate import gradients
    from crossfuse.workload.cascade_build import prim_func

    if not isinstance(spec, RowsGradient):
        return prim_func(spec)
    func = gradients(prim_func(spec.of), wrt=[spec.of.operands[0].name]).function
    wanted = [each.name for each in (*spec.operands, *spec.outputs)]
    assert [str(each.name) for each in func.params] == wanted
    return func
