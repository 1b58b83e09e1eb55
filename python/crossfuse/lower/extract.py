"""Runs the pipeline on one function and reads what it made off the lowered module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.hardware import Device, tvm_target
from crossfuse.lower.image import BufferSpec, Dim3, KernelImage, Launch
from crossfuse.lower.passes import refusals
from crossfuse.lower.pipeline import cluster_passes, host_passes, install_pipeline
from crossfuse.lower.place_shared_memory import SHARED_MEMORY
from crossfuse.lower.shared_memory_plan import Placement, SharedMemoryPlan

ENTRY = "main"


@dataclass(frozen=True)
class Lowered:
    """A lowered function.

    Attributes
    ----------
    image : KernelImage
        Generated CUDA, launches and buffers.
    shared_memory : SharedMemoryPlan
        Where each shared buffer lies in a CTA (of all kernels of the function).
    """

    image: KernelImage
    shared_memory: SharedMemoryPlan


def lower(func: Any, target: str | Device = "nvidia-h100", *, name: str = ENTRY) -> Lowered:
    """Lower a scheduled function to CUDA for clusters.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc | tvm.s_tir.Schedule | tvm.ir.IRModule
        A scheduled function with constant shapes; of a schedule or module, its only function.
    target : str | Device
        Device name, see `crossfuse.hardware.device`.
    name : str
        Name of the compiled function.

    Returns
    -------
    Lowered
        Generated code as plain values, with the shared memory plan.

    Raises
    ------
    LoweringRefused
        If the function has no correct cluster kernel, or none that fits the device.
    """
    install_pipeline()
    function = only_function(func)
    buffers = buffer_specs(function)
    module = ir.IRModule({name: function.with_attr("global_symbol", name)})
    module = ir.tirx.transform.BindTarget(tvm_target(target))(module)
    _, _, finalize_device = ir.tirx.get_tir_pipeline("s_tir")
    config = ir.tvm.transform.PassContext.current().config
    sequential = ir.tvm.ir.transform.Sequential
    with refusals():
        module = sequential(cluster_passes(config))(module)
    placements = _shared_memory(module)
    module = sequential(host_passes())(module)
    kernels = [each for each in module.functions.items() if _is_kernel(each[1])]
    if not kernels:
        raise refuse(
            LoweringRefused,
            "lower",
            f"function '{name}'",
            found="no loop bound to CTAs or threads",
            limit="a function scheduled for a GPU",
            instead="bind loops with sch.bind and sch.cluster_bind first",
        )
    device_module = finalize_device()(ir.IRModule(dict(kernels), attrs=module.attrs))
    generate = ir.tvm.get_global_func("target.build.cuda")
    source = generate(device_module, kernels[0][1].attrs["target"]).inspect_source()
    launches = tuple(
        _launch(str(var.name_hint), kernel) for var, kernel in _ordered(module, kernels)
    )
    image = KernelImage(name, str(source), buffers, launches)
    return Lowered(image, placements)


def only_function(func: Any) -> Any:
    """The PrimFunc of a schedule or module that has just one."""
    if isinstance(func, ir.PrimFunc):
        return func
    module = func.mod if isinstance(func, ir.Schedule) else func
    functions = [each for each in module.functions.values() if isinstance(each, ir.PrimFunc)]
    if len(functions) != 1:
        raise refuse(
            LoweringRefused,
            "lower",
            "module",
            found=f"{len(functions)} functions",
            limit="one PrimFunc",
            instead="pass the function to lower",
        )
    return functions[0]


def buffer_specs(function: Any) -> tuple[BufferSpec, ...]:
    """Parameters of a function of constant shapes; those that it writes are outputs.

    Raises
    ------
    LoweringRefused
        If a parameter is no buffer, or its shape is symbolic.
    """
    written = _written(function)
    specs: list[BufferSpec] = []
    for parameter in function.params:
        shape = (
            tuple(ir.constant(extent) for extent in parameter.ty.shape)
            if ir.is_buffer_var(parameter)
            else (None,)
        )
        if any(extent is None for extent in shape):
            raise refuse(
                LoweringRefused,
                "lower",
                f"parameter '{parameter.name}'",
                found=str(parameter.ty),
                limit="buffers of constant shape",
                instead="specialise the function to one shape first",
            )
        fixed = tuple(int(extent) for extent in shape if extent is not None)
        name = str(parameter.name)
        specs.append(BufferSpec(name, fixed, str(parameter.ty.dtype), name in written))
    return tuple(specs)


def _written(function: Any) -> set[str]:
    names: set[str] = set()
    ir.walk(function.body, (ir.BufferStore, lambda store: names.add(str(store.buffer.name))))
    return names


def _is_kernel(function: Any) -> bool:
    attrs = function.attrs
    return attrs is not None and "tirx.kernel_launch_params" in attrs


def _ordered(module: Any, kernels: list[Any]) -> list[Any]:
    """Kernels in the order of their launches in the host function."""
    calls: list[str] = []

    def visit(call: Any) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.call_ffi_kernel":
            calls.append(str(call.args[0].value))

    for function in module.functions.values():
        if not _is_kernel(function):
            ir.walk(function.body, (ir.Call, visit))
    by_name = {str(var.name_hint): (var, kernel) for var, kernel in kernels}
    return [by_name[name] for name in calls] if len(calls) == len(kernels) else kernels


def _launch(symbol: str, kernel: Any) -> Launch:
    extents: dict[str, int] = {}
    shared: list[int] = []

    def visit_launch(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    def visit_allocation(node: Any) -> None:
        if node.buffer.scope() == "shared.dyn":
            dtype = ir.tvm.DataType(str(node.buffer.ty.dtype))
            size = dtype.bits // 8 * dtype.lanes
            for extent in node.buffer.ty.shape:
                size *= int(extent)
            shared.append(size)

    ir.walk(kernel.body, (ir.AttrStmt, visit_launch), (ir.AllocBuffer, visit_allocation))

    def dims(prefix: str) -> Dim3:
        x, y, z = (extents.get(f"{prefix}.{axis}", 1) for axis in "xyz")
        return (x, y, z)

    arguments = tuple(str(each.name).removesuffix("_ptr") for each in kernel.params)
    return Launch(
        symbol, dims("blockIdx"), dims("threadIdx"), dims("clusterCtaIdx"), sum(shared), arguments
    )


def _shared_memory(module: Any) -> SharedMemoryPlan:
    placements: list[Placement] = []
    for function in module.functions.values():
        for name, numbers in dict((function.attrs or {}).get(SHARED_MEMORY) or {}).items():
            placements.append(Placement(str(name), *(int(each) for each in numbers)))
    total = max((each.offset + each.size for each in placements), default=0)
    return SharedMemoryPlan(tuple(placements), total)
