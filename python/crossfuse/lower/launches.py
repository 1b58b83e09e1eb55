"""Kernels and their launches, read off a lowered module and its host function."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import Dim3, Launch
from crossfuse.lower.refusal import refuse
from crossfuse.lower.shared_memory_plan import size_in_bytes
from crossfuse.lower.tree import sites


def check_host(function: Any) -> None:
    """All stores are part of a kernel: an image has no host code."""
    for site in sites(function.body):
        launched = any(
            isinstance(each, ir.AttrStmt) and str(each.attr_key) == "thread_extent"
            for each in site.path
        )
        if isinstance(site.node, ir.BufferStore) and not launched:
            raise _refuse_host(f"a store outside every kernel: {site.text}")


def is_kernel(function: Any) -> bool:
    """Whether a function of the module runs on the device."""
    attrs = function.attrs
    return attrs is not None and "tirx.kernel_launch_params" in attrs


def kernels_of(module: Any) -> list[tuple[str, Any]]:
    """Symbols and functions of the kernels, in the order of their launches."""
    by_name = {str(v.name_hint): each for v, each in module.functions.items() if is_kernel(each)}
    calls: list[str] = []
    for function in module.functions.values():
        if is_kernel(function):
            continue
        for site in sites(function.body):
            names = _launched(site.node)
            if names and any(isinstance(each, (ir.For, ir.tirx.While)) for each in site.path):
                raise _refuse_host(f"a loop around the launch of {names[0]}")
            calls += names
    if sorted(calls) != sorted(by_name):
        raise _refuse_host(f"launches {', '.join(calls)} of kernels {', '.join(by_name)}")
    return [(name, by_name[name]) for name in calls]


def _launched(statement: Any) -> list[str]:
    """Kernels that a statement of the host function launches."""
    names: list[str] = []

    def visit(call: Any) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.call_ffi_kernel":
            names.append(str(call.args[0].value))

    if isinstance(statement, (ir.Evaluate, ir.Bind)):
        ir.walk(statement, (ir.Call, visit))
    return names


def _refuse_host(found: str) -> Exception:
    return refuse(
        "lower",
        "host code",
        found=found,
        limit="kernels alone, each launched once, in program order",
        instead="bind the loops of every block to CTAs or threads",
    )


def launch_of(symbol: str, kernel: Any) -> Launch:
    """How a kernel is launched: extents, shared memory and arguments, as its body tells."""
    extents: dict[str, int] = {}
    shared: list[int] = []

    def visit_launch(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    def visit_allocation(node: Any) -> None:
        if node.buffer.scope() == "shared.dyn":
            shared.append(size_in_bytes(node.buffer))

    ir.walk(kernel.body, (ir.AttrStmt, visit_launch), (ir.AllocBuffer, visit_allocation))

    def dims(prefix: str) -> Dim3:
        x, y, z = (extents.get(f"{prefix}.{axis}", 1) for axis in "xyz")
        return (x, y, z)

    arguments = tuple(str(each.name).removesuffix("_ptr") for each in kernel.params)
    return Launch(
        symbol, dims("blockIdx"), dims("threadIdx"), dims("clusterCtaIdx"), sum(shared), arguments
    )
