"""The lowering's output as plain values: CUDA text, its launches and its buffers.

Emulators and the runtime read a `KernelImage`; neither needs the compiler that made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.lower.refusal import refuse
from crossfuse.markers import EARLY, constant_parameters
from crossfuse.schema import Count, Extent

Dim3 = tuple[Extent, Extent, Extent]

#: Name of the parameter, a 32-bit integer, that tells a kernel how many rows there are.
ROW_COUNT = "crossfuse_rows"
#: Parameters of a kernel that runs on several GPUs: its rank, and the counts by which GPUs wait for
#: each other, between kernels or, of turns, inside of one.
RANK, ARRIVALS, TURNS = "crossfuse_rank", "crossfuse_arrivals", "crossfuse_turns"
COUNTS = (ARRIVALS, TURNS)
#: Bytes that a slab of a window is a multiple of: the unit in which CUDA maps memory of H100s
#: (cuMemGetAllocationGranularity).
WINDOW_UNIT = 2 << 20


@dataclass(frozen=True)
class BufferSpec:
    """A buffer in global memory: an argument of the compiled function, a workspace or state."""

    name: str
    #: Row-major.
    shape: tuple[Extent, ...]
    #: As TVM and ml_dtypes spell it, such as ``"bfloat16"``.
    dtype: str
    #: Whether the function writes it.
    output: bool
    #: Whether the first extent counts rows of which a call may have fewer; the same number in all
    #: such buffers of a call.
    rows: bool = False
    #: GPUs in whose memory it lies, a row of it in each; 0 for a buffer of one GPU alone.
    ranks: Count = 0

    def with_rows(self, count: int) -> BufferSpec:
        """The same buffer with another number of rows, if it has any."""
        return replace(self, shape=(count, *self.shape[1:])) if self.rows else self


@dataclass(frozen=True)
class PixelBox:
    """Where copies of pixels begin, as the im2col mode of TMA has it.

    Copies walk through a box of pixels of each image, row by row and image by image; each pixel is
    loaded at an offset from there, which a copy gives, as zeros if that lies beyond the image.
    """

    #: First pixel of the box, counted from the first of the image: column, then row.
    lower: tuple[int, ...]
    #: Last pixel of the box, counted from the last of the image.
    upper: tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor that a kernel takes by value: how a box of a buffer is copied."""

    #: Of the kernel's parameter.
    name: str
    #: Name of the `BufferSpec` in global memory.
    buffer: str
    #: Of the buffer in elements, innermost dimension first.
    extents: tuple[Extent, ...]
    #: Of every dimension but the innermost, in bytes; multiples of 16.
    strides: tuple[Extent, ...]
    #: What one copy moves, innermost first, at most 256 each. With `pixels`: how many channels of
    #: how many pixels.
    box: tuple[Extent, ...]
    #: Bytes that one swizzle pattern spans in shared memory: 0, 32, 64 or 128.
    swizzle: int
    #: Bytes that L2 fetches at least from memory: 128, or 256 where what follows in a row is needed
    #: soon.
    fetch: int = 128
    #: For copies of pixels of images [batch, row, column, channel].
    pixels: PixelBox | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `grid` counts CTAs (not clusters), as CUDA does."""

    #: Name of the ``__global__`` function.
    symbol: str
    #: Extents of grid, block and cluster are each (x, y, z).
    grid: Dim3
    block: Dim3
    cluster: Dim3
    #: Of one CTA.
    dynamic_shared_bytes: Count
    #: Names of a `BufferSpec` or `TensorMap`, or `ROW_COUNT`, in the order of the kernel's
    #: parameters.
    arguments: tuple[str, ...]
    #: Descriptors among the arguments.
    tensor_maps: tuple[TensorMap, ...] = ()
    #: Whether it may start before the preceding launch is over (programmatic dependent launch); the
    #: kernel itself waits where it depends on that launch.
    early: bool = False
    #: Whether all CTAs of the grid must run at the same time, because they wait for each other
    #: through global memory. The driver refuses a launch of more than fit.
    cooperative: bool = False
    #: Whether a CTA that has waited long for others does their part itself: then clusters may run
    #: at the same time, or some after others are over.
    helps: bool = False

    @property
    def cluster_size(self) -> int:
        """Number of CTAs in one cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass(frozen=True)
class KernelImage:
    """A lowered function: generated CUDA and how to launch it."""

    #: Of the function it was lowered from.
    name: str
    #: CUDA C++, all kernels of the function in one text.
    cuda: str
    #: Arguments in the order of the function's parameters.
    buffers: tuple[BufferSpec, ...]
    #: In program order.
    launches: tuple[Launch, ...]
    #: Intermediates between the launches, which the runtime allocates for each call.
    workspaces: tuple[BufferSpec, ...] = ()
    #: Zero before the first launch and carried from one to the next, such as flags. Launches that
    #: may run at the same time have memory of their own for it.
    state: tuple[BufferSpec, ...] = ()

    @property
    def memory(self) -> tuple[BufferSpec, ...]:
        """Everything in global memory: arguments, then workspaces, then state."""
        return (*self.buffers, *self.workspaces, *self.state)

    @property
    def rows(self) -> int | None:
        """Maximum number of rows of a call; None if each call has all rows."""
        return next((each.shape[0] for each in self.buffers if each.rows), None)

    def as_first(self) -> KernelImage:
        """The same kernels as the first of a chain: they start when all before them is over."""
        first, *others = self.launches
        return replace(self, launches=(replace(first, early=False), *others))

    def with_rows(self, count: int) -> KernelImage:
        """The same kernels on `count` of their `rows`, as one call of them sees it.

        Descriptors of buffers with rows end where the rows do; workspaces keep all of theirs.
        """
        with_rows = {each.name for each in self.buffers if each.rows}

        def cut(map_: TensorMap) -> TensorMap:
            if map_.buffer not in with_rows:
                return map_
            return replace(map_, extents=(*map_.extents[:-1], count))

        launches = tuple(
            replace(each, tensor_maps=tuple(map(cut, each.tensor_maps))) for each in self.launches
        )
        buffers = tuple(each.with_rows(count) for each in self.buffers)
        return replace(self, buffers=buffers, launches=launches)


@dataclass(frozen=True)
class Placement:
    """Where one buffer lies, and when it is in use."""

    name: str
    #: Bytes from the start of dynamic shared memory.
    offset: int
    #: Bytes.
    size: int
    #: First and last barrier interval in which it is used.
    first: int
    last: int


@dataclass(frozen=True)
class SharedMemoryPlan:
    """Placements of all shared buffers of a kernel, by descending size."""

    placements: tuple[Placement, ...]
    #: Bytes of dynamic shared memory that the kernel needs.
    total: int


def check_budget(plan: SharedMemoryPlan, limit: int = MAX_SHARED_BYTES) -> None:
    """Refuse a plan of more than `limit` bytes, naming every buffer and its bytes."""
    if plan.total <= limit:
        return
    sizes = ", ".join(f"'{each.name}' {each.size}" for each in plan.placements)
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{plan.total} bytes ({sizes})",
        limit=f"{limit} bytes of shared memory in a CTA",
        instead="use smaller tiles, a larger cluster, or stage parts of a slice (a dsm_shuffle "
        "loop inside the slice loop)",
    )


# Kernels that start while the one before them runs (programmatic dependent launch).
#
# Such a kernel lets the next one begin at its own beginning, and waits for the end of the one
# before it: its CTAs are there when that one ends, which hides a launch. Any kernel of ours can.
# One that waits where it has to, as a product with constant weights does, stays as it is; others
# wait before they touch global memory. Some thread waits in each, so that whoever waits for the end
# of a kernel comes after all kernels before it.

#: The call by which kernels wait behind loads of weights, see `crossfuse.lower.kernel`.
WAIT_BEHIND = "crossfuse_await_behind_loads"
#: The calls by which kernels of the Hopper pipeline let the next one begin, and those that ask for
#: weights first.
_LETS = ("griddepcontrol_launch_dependents", WAIT_BEHIND)
_HELPERS = """\
__device__ __forceinline__ void crossfuse_let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
__device__ __forceinline__ void crossfuse_await_kernel_before() {
  asm volatile("griddepcontrol.wait;" : : : "memory");
}
"""
_KERNEL = 'extern "C" __global__'
_HEAD = re.compile(rf"{_KERNEL}[^;{{]*")
_RESTRICT = re.compile(r"__restrict__ (?P<parameter>(?P<name>\w+?)(?:_ptr)?)\b")


def starting_early(func: Any, constant: Sequence[str] = ()) -> Any:
    """The same function, whose kernels `lower` has start while the kernel before them runs.

    No kernel that may still be running then writes the parameters named in `constant`: a product
    whose right operands are all among them loads these before it waits.
    """
    return func.with_attr(EARLY, ",".join(constant))


def check_constant(func: Any, buffers: Sequence[BufferSpec]) -> None:
    """Refuse a function that names what is no input of it as constant."""
    inputs = [each.name for each in buffers if not each.output]
    for name in constant_parameters(func):
        if name not in inputs:
            raise refuse(
                EARLY,
                f"parameter '{name}'",
                found="an output" if name in [e.name for e in buffers] else "no parameter",
                limit=f"inputs of the function ({', '.join(inputs)})",
                instead="name parameters that no kernel writes before this one is over",
            )


def start_early(image: KernelImage, constant: Sequence[str] = ()) -> KernelImage:
    """The same function, each of whose kernels may start before the one before it is over.

    What no kernel writes, and so need not wait for any, is named in `constant`.
    """
    inputs = {each.name for each in image.buffers if not each.output} - set(constant)
    between = {each.name for each in (*image.workspaces, *image.state)}
    text = _ordered(image.cuda, inputs | between)
    for launch in {each.symbol: each for each in image.launches}.values():
        text = _begun(text, launch)
    first = text.index(_KERNEL)
    return replace(
        image,
        cuda=f"{text[:first]}{_HELPERS}{text[first:]}",
        launches=tuple(replace(each, early=True) for each in image.launches),
    )


def _ordered(text: str, read: Collection[str]) -> str:
    """The text in which no load of what is `read` moves in front of a wait.

    Of parameters that nothing else is said to point to, nvcc makes loads of constants, which both
    it and ptxas put where they like.
    """
    return kernel_heads(text, lambda head: promising(head, lambda name: name not in read))


def promising(head: str, keeps: Callable[[str], bool]) -> str:
    """A kernel's parameters, of which those that it `keeps` say that nothing else points there."""

    def plain(parameter: re.Match[str]) -> str:
        return parameter[0] if keeps(parameter["name"]) else parameter["parameter"]

    return _RESTRICT.sub(plain, head)


def kernel_heads(text: str, change: Callable[[str], str]) -> str:
    """The text with the parameters of kernels changed, in declarations too."""
    return _HEAD.sub(lambda head: change(head[0]), text)


def _begun(text: str, launch: Launch) -> str:
    """The text with what a kernel lacks at its beginning."""
    head = rf"{_KERNEL}[^;{{]*\b{re.escape(launch.symbol)}\s*\([^;{{]*\)\s*\{{\n"
    kernel = re.search(head, text)
    assert kernel is not None, launch.symbol
    body = text[kernel.end() : text.index("\n}\n", kernel.end())]
    lines = [] if any(each in body for each in _LETS) else ["crossfuse_let_next_begin();"]
    lines += [] if launch.early else ["crossfuse_await_kernel_before();"]
    start = kernel.end()
    return text[:start] + "".join(f"  {each}\n" for each in lines) + text[start:]
