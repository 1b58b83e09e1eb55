"""Lowers one function, and reads buffers, launches and CUDA text off the lowered module.

Kernels of rows that TMA cannot copy are put on padded copies of their inputs here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse._autoload import register
from crossfuse.hardware import Device, device, tvm_target
from crossfuse.lower.buffers import SHARED_MEMORY, size_in_bytes
from crossfuse.lower.hidden import keep_nans
from crossfuse.lower.hopper.generate import generate
from crossfuse.lower.hopper.recover.function import row_tensors
from crossfuse.lower.image import (
    BufferSpec,
    Dim3,
    KernelImage,
    Launch,
    Placement,
    SharedMemoryPlan,
    check_budget,
    check_constant,
    start_early,
    starting_early,
)
from crossfuse.lower.kernel import waits_itself
from crossfuse.lower.pipeline import cluster_passes, host_passes
from crossfuse.lower.ranks import of_one_rank, with_windows
from crossfuse.lower.refusal import Rule, refusals, refuse
from crossfuse.lower.tree import accesses, coordinate, is_call, sites
from crossfuse.lower.verify.structure import check_grid_stage, check_structure, takes_fewer_rows
from crossfuse.markers import (
    ROWS,
    constant_parameters,
    is_tile_program,
    spans_ranks,
    starts_early,
    unpadded_shapes,
    workspace_names,
)
from crossfuse.workload.dtypes import float_type

_lower_refused = Rule("lower")

# Kernels on padded copies of their inputs: rows of the copies begin on multiples of 16 bytes.
#
# TMA copies no others. One launch before the kernels copies inputs into workspaces, with zeros at
# the end of each row. Inputs that only have fewer rows are not copied: their descriptors end
# sooner. Outputs are stored without TMA where their rows begin elsewhere.


_THREADS = 256
#: CTAs of a launch at most: eight for each SM of an H100, which hide the latency of their loads.
_CTAS = 1056
#: Unsigned types by their bytes: copies look at no number.
_WORDS = {1: "unsigned char", 2: "unsigned short"}
#: Bytes of a store. Reads are of one element each, since rows begin anywhere.
_PIECE = 16


def with_padding(image: KernelImage, shapes: Sequence[tuple[int, ...]]) -> KernelImage:
    """The function that takes inputs without padding, from the one that takes them padded.

    `shapes` are those of the inputs as callers pass them. Each input with longer rows in the
    kernels gets a workspace, and one launch fills them all.
    """
    names = {each.name for each in image.memory}
    read = {name for each in image.launches for name in each.arguments}
    wide = {each.name: each for each in image.buffers}
    shorter = {
        buffer.name: replace(buffer, shape=shape)
        for buffer, shape in zip(image.buffers, shapes, strict=False)
        if buffer.shape != shape
    }
    ended, copies = [], []
    for name, short in shorter.items():
        if _ends(short, wide[name]) and name not in read:
            ended.append(short)
        else:
            copies.append(_Copy(short, _workspace(wide[name], names)))
    found = replace(
        image,
        buffers=tuple(shorter.get(each.name, each) for each in image.buffers),
        launches=tuple(_ended(each, ended) for each in image.launches),
    )
    return _with_copies(found, copies) if copies else found


def _ends(short: BufferSpec, wide: BufferSpec) -> bool:
    """Whether a buffer has fewer rows of the same length: TMA loads zeros behind the last."""
    return len(short.shape) == 2 and short.shape[1] == wide.shape[1]


def _ended(launch: Launch, ended: Sequence[BufferSpec]) -> Launch:
    """A launch whose descriptors end where these inputs do."""
    rows = {each.name: each.shape[0] for each in ended}
    maps = tuple(
        replace(each, extents=(*each.extents[:-1], rows[each.buffer]))
        if each.buffer in rows
        else each
        for each in launch.tensor_maps
    )
    return replace(launch, tensor_maps=maps)


def _with_copies(image: KernelImage, copies: Sequence[_Copy]) -> KernelImage:
    moved = {each.short.name: each.wide.name for each in copies}
    return replace(
        image,
        cuda=f"{image.cuda}\n{_text(image, copies)}",
        launches=(_launch(image, copies), *(_on_copies(each, moved) for each in image.launches)),
        workspaces=(*image.workspaces, *(each.wide for each in copies)),
    )


@dataclass(frozen=True)
class _Copy:
    """An input, and the workspace with padded rows that replaces it."""

    short: BufferSpec
    wide: BufferSpec

    def statement(self, number: int) -> str:
        """A grid-stride loop over the workspace, 16 bytes at a time."""
        (rows, columns), width = _matrix(self.short), _matrix(self.wide)[1]
        size = float_type(self.short.dtype).numpy.itemsize
        word, piece = _WORDS[size], _PIECE // size
        return (
            f"  for (unsigned i = blockIdx.x * {_THREADS}u + threadIdx.x; "
            f"i < {self.pieces}u; i += gridDim.x * {_THREADS}u) {{\n"
            f"    const unsigned row = i / {width // piece}u;\n"
            f"    const unsigned column = i % {width // piece}u * {piece}u;\n"
            f"    const {word}* source = from{number} + (size_t)row * {columns}u + column;\n"
            f"    alignas({_PIECE}) {word} words[{piece}];\n"
            "    #pragma unroll\n"
            f"    for (unsigned j = 0; j < {piece}u; ++j)\n"
            f"      words[j] = row < {rows}u && column + j < {columns}u ? source[j] : 0;\n"
            f"    reinterpret_cast<uint4*>(to{number})[i] = *reinterpret_cast<uint4*>(words);\n"
            "  }\n"
        )

    @property
    def pieces(self) -> int:
        """Number of 16-byte stores: rows of the workspace are multiples of them."""
        size = float_type(self.short.dtype).numpy.itemsize
        return math.prod(self.wide.shape) * size // _PIECE


def _matrix(buffer: BufferSpec) -> tuple[int, int]:
    """A buffer as a matrix: (rows, length of the last extent)."""
    return math.prod(buffer.shape[:-1]), buffer.shape[-1]


def _workspace(buffer: BufferSpec, names: set[str]) -> BufferSpec:
    name = f"{buffer.name}_padded"
    while name in names:
        name += "_"
    return replace(buffer, name=name, output=True)


def _on_copies(launch: Launch, moved: dict[str, str]) -> Launch:
    """A launch that reads the copies instead of the inputs.

    It must not start early: what a kernel loads early was written by no kernel, but the copies
    were.
    """
    maps = tuple(
        replace(each, buffer=moved.get(each.buffer, each.buffer)) for each in launch.tensor_maps
    )
    arguments = tuple(moved.get(each, each) for each in launch.arguments)
    return replace(launch, arguments=arguments, tensor_maps=maps, early=False)


def _launch(image: KernelImage, copies: Sequence[_Copy]) -> Launch:
    pieces = max(each.pieces for each in copies)
    ctas = min(_CTAS, math.ceil(pieces / _THREADS))
    arguments = tuple(name for each in copies for name in (each.short.name, each.wide.name))
    alone = (1, 1, 1)
    return Launch(f"{image.name}_pad", (ctas, 1, 1), (_THREADS, 1, 1), alone, 0, arguments)


def _text(image: KernelImage, copies: Sequence[_Copy]) -> str:
    words = [_WORDS[float_type(each.short.dtype).numpy.itemsize] for each in copies]
    parameters = ", ".join(
        f"const {word}* __restrict__ from{i}, {word}* __restrict__ to{i}"
        for i, word in enumerate(words)
    )
    head = f'extern "C" __global__ void __launch_bounds__({_THREADS}) {image.name}_pad'
    body = "".join(each.statement(i) for i, each in enumerate(copies))
    return f"{head}({parameters}) {{\n{body}}}\n"


# Checks of the image: kernels use its own buffers only, and stay within the limits of the device.


def check_image(image: KernelImage) -> None:
    """Refuse kernels that take anything but the function's own buffers."""
    names = [buffer.name for buffer in image.memory]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _lower_refused(
            f"parameter '{twice}'",
            found="two parameters of one name",
            limit="parameters told apart by their names",
            instead="give each buffer of the function a name of its own",
        )
    for launch in image.launches:
        for name in launch.arguments:
            if name not in names:
                raise _lower_refused(
                    f"kernel '{launch.symbol}'",
                    found=f"argument '{name}', which is no parameter of the function",
                    limit=f"kernels on the function's own buffers ({', '.join(names)})",
                    instead="pass an intermediate between two kernels as a parameter, or keep it "
                    "inside one kernel",
                )


def check_device(image: KernelImage, placements: SharedMemoryPlan, spec: Device) -> None:
    """Refuse launches beyond what this device allows."""
    for launch in image.launches:
        x, y, z = launch.block
        for what, found, limit in (
            ("CTAs in a cluster", launch.cluster_size, spec.max_cluster),
            ("threads in a CTA", x * y * z, spec.max_threads),
        ):
            if found > limit:
                raise refuse(
                    "device-limit",
                    f"kernel '{launch.symbol}' on {spec.name}",
                    found=f"{found} {what}",
                    limit=f"{limit} {what}",
                    instead="bind smaller loops",
                )
    needed = max(launch.dynamic_shared_bytes for launch in image.launches)
    check_budget(SharedMemoryPlan(placements.placements, needed), spec.max_shared_bytes)


def check_host(function: Any) -> None:
    """Refuse stores outside kernels: an image has no host code."""
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
    if not isinstance(statement, (ir.Evaluate, ir.Bind)):
        return []
    calls = ir.nodes(statement, ir.Call)
    return [str(each.args[0].value) for each in calls if is_call(each, "tirx.call_ffi_kernel")]


def _refuse_host(found: str) -> Exception:
    return _lower_refused(
        "host code",
        found=found,
        limit="kernels alone, each launched once, in program order",
        instead="bind the loops of every block to CTAs or threads",
    )


def launch_of(symbol: str, kernel: Any) -> Launch:
    """How a kernel is launched: extents, shared memory and arguments, read off its body."""
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
        symbol,
        dims("blockIdx"),
        dims("threadIdx"),
        dims("clusterCtaIdx"),
        sum(shared),
        arguments,
        early=waits_itself(kernel),
    )


ENTRY = "main"


#: Names of parameters that generated code can have; what C lacks of it becomes an underscore.
_NAME = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)


@dataclass(frozen=True)
class Lowered:
    """The result of lowering one function."""

    image: KernelImage
    #: Of all kernels of the function.
    shared_memory: SharedMemoryPlan
    #: With a timeline: the events of each kernel, columns of its extra output.
    events: tuple[tuple[str, ...], ...] = ()


def lower(
    func: Any,
    target: str | Device | None = None,
    *,
    name: str = ENTRY,
    timeline: bool = False,
    early: bool = False,
) -> Lowered:
    """Lower a scheduled function to CUDA for clusters.

    `func` is a PrimFunc of constant shapes, or a schedule or module that holds just one; `target`
    is anything that `crossfuse.hardware.device` takes. `timeline` has kernels of the Hopper
    pipeline record when they did what, in one more output each. `early` has each kernel start
    before the one before it is over, in this function or another: for functions that are called one
    behind the other; so do functions marked by `crossfuse.lower.image.starting_early`. Of a
    function over several GPUs it is what one of them runs, see `crossfuse.lower.ranks`. Refused if
    the function has no correct cluster kernel, or none that fits the device.
    """
    register()
    function = keep_nans(only_function(func))
    if early and not starts_early(function):
        function = starting_early(function)
    across = spans_ranks(function)
    spec = device(target)
    mine = of_one_rank(function, spec.sms) if across else function
    lowered = _lowered(mine, spec, name, timeline)
    if across:
        lowered = replace(lowered, image=with_windows(lowered.image, mine))
    if shapes := unpadded_shapes(function):
        lowered = replace(lowered, image=with_padding(lowered.image, shapes))
    if not starts_early(function):
        return lowered
    return replace(lowered, image=start_early(lowered.image, constant_parameters(function)))


def _lowered(function: Any, spec: Device, name: str, timeline: bool) -> Lowered:
    """Lower a function as it stands; arguments that are padded stay so."""
    buffers = _parameters(function)
    check_constant(function, buffers)
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
    image = KernelImage(name, cuda, buffers, launches, _workspaces(function))
    check_image(image)
    check_device(image, placements, spec)
    return Lowered(image, placements)


def _workspaces(function: Any) -> tuple[BufferSpec, ...]:
    """Buffers that the function names as such, and allocates."""
    named = workspace_names(function)
    own = [each for each in function.body.block.alloc_buffers if str(each.name) in named]
    return tuple(
        BufferSpec(str(e.name), tuple(map(int, e.ty.shape)), str(e.ty.dtype), True) for e in own
    )


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
    """Kernels split from their host function, and the plan of shared memory."""
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
    return ir.cuda_text(device_module, kernels[0][1].attrs["target"])


def only_function(func: Any) -> Any:
    """The PrimFunc of a schedule or module that has just one."""
    if isinstance(func, ir.PrimFunc):
        return func
    module = func.mod if isinstance(func, ir.Schedule) else func
    functions = [each for each in module.functions.values() if isinstance(each, ir.PrimFunc)]
    if len(functions) != 1:
        raise _lower_refused(
            "module",
            found=f"{len(functions)} functions",
            limit="one PrimFunc",
            instead="pass the function to lower",
        )
    return functions[0]


def buffer_specs(function: Any) -> tuple[BufferSpec, ...]:
    """Arguments of a function of constant shapes, as callers pass them, without padding.

    Refused if a parameter is no buffer or its shape is symbolic, or if a function that accepts
    fewer rows has no rows that can be left out.
    """
    found = _parameters(function)
    shapes = unpadded_shapes(function)
    shorter = (replace(each, shape=shape) for each, shape in zip(found, shapes, strict=False))
    return (*shorter, *found[len(shapes) :])


def _parameters(function: Any) -> tuple[BufferSpec, ...]:
    """Parameters of a function as its kernels see them, padded where arguments are."""
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
            raise _lower_refused(
                f"parameter '{parameter.name}'",
                found=_shape_text(parameter),
                limit="buffers of constant shape",
                instead="specialise the function to one shape first",
            )
        fixed = tuple(int(extent) for extent in shape if extent is not None)
        name = str(parameter.name)
        if not _NAME.fullmatch(name):
            raise _lower_refused(
                f"parameter {name!r}",
                found="a name that CUDA has no place for",
                limit="letters of ASCII, digits, '_', '.' and '-', no digit first",
                instead="rename the parameter",
            )
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
    if not any(map(coordinate, ir.nodes(function.body, ir.For))):
        raise _lower_refused(
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
