"""Runs the pipeline on one function and reads what it made off the lowered module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse._autoload import register
from crossfuse.hardware import Device, device, tvm_target
from crossfuse.lower.check_image import check_device, check_image
from crossfuse.lower.hopper import generate, is_tile_program, row_tensors, takes_fewer_rows
from crossfuse.lower.image import BufferSpec, KernelImage
from crossfuse.lower.keep_nans import keep_nans
from crossfuse.lower.launches import check_host, is_kernel, kernels_of, launch_of
from crossfuse.lower.padded_rows import with_padding
from crossfuse.lower.pipeline import cluster_passes, host_passes
from crossfuse.lower.place_shared_memory import SHARED_MEMORY
from crossfuse.lower.refusal import refusals, refuse
from crossfuse.lower.shared_memory_plan import Placement, SharedMemoryPlan
from crossfuse.lower.tree import accesses, coordinate
from crossfuse.lower.verify.grid_stage import check_grid_stage
from crossfuse.lower.verify.structure import check_structure
from crossfuse.markers import ROWS, unpadded_shapes

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
    events : tuple[tuple[str, ...], ...]
        With a timeline: the events of each kernel, columns of its output.
    """

    image: KernelImage
    shared_memory: SharedMemoryPlan
    events: tuple[tuple[str, ...], ...] = ()


def lower(
    func: Any,
    target: str | Device | None = None,
    *,
    name: str = ENTRY,
    timeline: bool = False,
) -> Lowered:
    """Lower a scheduled function to CUDA for clusters.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc | tvm.s_tir.Schedule | tvm.ir.IRModule
        A scheduled function with constant shapes; of a schedule or module, its only function.
    target : str | Device | None
        Device name, see `crossfuse.hardware.device`.
    name : str
        Name of the compiled function.
    timeline : bool
        Whether kernels of the Hopper pipeline note when they did what, in one more output each.

    Returns
    -------
    Lowered
        Generated code as plain values, with the shared memory plan.

    Raises
    ------
    LoweringRefused
        If the function has no correct cluster kernel, or none that fits the device.
    """
    register()
    function = keep_nans(only_function(func))
    lowered = _lowered(function, device(target), name, timeline)
    if shapes := unpadded_shapes(function):
        return replace(lowered, image=with_padding(lowered.image, shapes))
    return lowered


def _lowered(function: Any, spec: Device, name: str, timeline: bool) -> Lowered:
    """A function as it is, of padded arguments if it has such."""
    buffers = _parameters(function)
    _check_bound(function, name)
    with refusals(f"function '{name}'"):
        check_structure(function)
        if is_tile_program(function):
            image, placements, events = generate(function, buffers, spec, name, timeline)
            check_device(image, placements, spec)
            return Lowered(image, placements, events)
        check_grid_stage(function)
        _check_untimed(timeline, name)
        module, placements = _run_passes(function, spec, name)
        kernels = kernels_of(module)
        cuda = _generate(module, kernels)
    launches = tuple(launch_of(symbol, kernel) for symbol, kernel in kernels)
    image = KernelImage(name, cuda, buffers, launches)
    check_image(image)
    check_device(image, placements, spec)
    return Lowered(image, placements)


def _check_untimed(timeline: bool, name: str) -> None:
    if timeline:
        raise refuse(
            "timeline",
            f"function '{name}'",
            found="a kernel of the general lowering",
            limit="kernels of the Hopper pipeline, which have phases to tell apart",
            instead="schedule it with stages (rule 'tensor'), or profile it with Nsight Compute",
        )


def _run_passes(function: Any, spec: Device, name: str) -> tuple[Any, SharedMemoryPlan]:
    """The module with kernels apart from their host function, and where shared buffers lie."""
    module = ir.IRModule({name: function.with_attr("global_symbol", name)})
    module = ir.tirx.transform.BindTarget(tvm_target(spec))(module)
    config = ir.tvm.transform.PassContext.current().config
    sequential = ir.tvm.ir.transform.Sequential
    module = sequential(cluster_passes(config))(module)
    check_host(module[name])
    placements = _shared_memory(module)
    return sequential(host_passes())(module), placements


def _generate(module: Any, kernels: list[tuple[str, Any]]) -> str:
    """CUDA text of all kernels."""
    _, _, finalize_device = ir.tirx.get_tir_pipeline("s_tir")
    functions = {var: each for var, each in module.functions.items() if is_kernel(each)}
    device_module = finalize_device()(ir.IRModule(functions, attrs=module.attrs))
    generate = ir.tvm.get_global_func("target.build.cuda")
    return str(generate(device_module, kernels[0][1].attrs["target"]).inspect_source())


def only_function(func: Any) -> Any:
    """The PrimFunc of a schedule or module that has just one."""
    if isinstance(func, ir.PrimFunc):
        return func
    module = func.mod if isinstance(func, ir.Schedule) else func
    functions = [each for each in module.functions.values() if isinstance(each, ir.PrimFunc)]
    if len(functions) != 1:
        raise refuse(
            "lower",
            "module",
            found=f"{len(functions)} functions",
            limit="one PrimFunc",
            instead="pass the function to lower",
        )
    return functions[0]


def buffer_specs(function: Any) -> tuple[BufferSpec, ...]:
    """Arguments of a function of constant shapes, as callers pass them; outputs are written.

    Raises
    ------
    LoweringRefused
        If a parameter is no buffer, or its shape is symbolic; or if a function that takes fewer
        rows has none to leave out.
    """
    found = _parameters(function)
    shapes = unpadded_shapes(function)
    shorter = (replace(each, shape=shape) for each, shape in zip(found, shapes, strict=False))
    return (*shorter, *found[len(shapes) :])


def _parameters(function: Any) -> tuple[BufferSpec, ...]:
    """Parameters of a function, which may be padded."""
    written = {access.buffer for access in accesses(function.body) if access.write}
    by_row = _row_tensors(function)
    specs: list[BufferSpec] = []
    for parameter in function.params:
        shape = (
            tuple(ir.constant(extent) for extent in parameter.ty.shape)
            if ir.is_buffer_var(parameter)
            else (None,)
        )
        if any(extent is None for extent in shape):
            raise refuse(
                "lower",
                f"parameter '{parameter.name}'",
                found=_shape_text(parameter),
                limit="buffers of constant shape",
                instead="specialise the function to one shape first",
            )
        fixed = tuple(int(extent) for extent in shape if extent is not None)
        name = str(parameter.name)
        dtype, rows = str(parameter.ty.dtype), parameter in by_row
        specs.append(BufferSpec(name, fixed, dtype, parameter in written, rows))
    return tuple(specs)


def _row_tensors(function: Any) -> tuple[Any, ...]:
    """Parameters of which a call may have fewer rows."""
    if not takes_fewer_rows(function):
        return ()
    if unpadded_shapes(function):
        raise refuse(
            ROWS,
            "function",
            found="arguments whose rows are padded for TMA, all of them in each call",
            limit="extents whose rows are multiples of 16 bytes",
            instead="pad the model's widths, or leave accept_fewer_rows out",
        )
    if not is_tile_program(function):
        raise refuse(
            ROWS,
            "function",
            found="a schedule of the general lowering",
            limit="kernels of the Hopper pipeline, which load and store tiles of fewer rows",
            instead="schedule it with stages (rule 'tensor'), or leave accept_fewer_rows out",
        )
    with refusals("function"):
        return row_tensors(function)


def _shape_text(parameter: Any) -> str:
    if not ir.is_buffer_var(parameter):
        return f"a parameter of type {parameter.ty}"
    return f"shape ({', '.join(str(extent) for extent in parameter.ty.shape)})"


def _check_bound(function: Any, name: str) -> None:
    bound: list[Any] = []
    ir.walk(function.body, (ir.For, lambda loop: bound.append(loop) if coordinate(loop) else None))
    if not bound:
        raise refuse(
            "lower",
            f"function '{name}'",
            found="no loop bound to CTAs or threads",
            limit="a function scheduled for a GPU",
            instead="bind loops with sch.bind and sch.cluster_bind first",
        )


def _shared_memory(module: Any) -> SharedMemoryPlan:
    placements: list[Placement] = []
    for function in module.functions.values():
        for name, numbers in dict((function.attrs or {}).get(SHARED_MEMORY) or {}).items():
            placements.append(Placement(str(name), *(int(each) for each in numbers)))
    total = max((each.offset + each.size for each in placements), default=0)
    return SharedMemoryPlan(tuple(placements), total)
