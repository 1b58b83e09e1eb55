"""Where each shared buffer of a cluster kernel lies in the CTA's dynamic shared memory.

TVM's own merging pass recycles memory between buffers without a synchronisation between the last
access to one and the first to the other, and it does not know that peers read a slab until the
next cluster barrier. Here two buffers share bytes only if a cluster barrier lies between their
uses, in every CTA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.intrinsics import is_barrier
from crossfuse.lower.tree import children, evaluated

#: Bytes; a bulk access wants 128, and buffers that want more say so.
ALIGNMENT = 128
SCOPES = ("shared", "shared.dyn")


@dataclass(frozen=True)
class Placement:
    """One buffer of the plan.

    Attributes
    ----------
    name : str
        Name of the buffer.
    offset, size : int
        Bytes from the start of dynamic shared memory, and bytes.
    first, last : int
        Numbers of the first and last barrier interval in which it is used.
    """

    name: str
    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class SharedMemoryPlan:
    """Placements of all shared buffers of a kernel, by descending size.

    Attributes
    ----------
    placements : tuple[Placement, ...]
        The buffers.
    total : int
        Bytes of dynamic shared memory the kernel needs.
    """

    placements: tuple[Placement, ...]
    total: int


def plan_shared_memory(body: Any) -> tuple[SharedMemoryPlan, dict[Any, int]]:
    """Place the shared buffers allocated below `body`.

    Parameters
    ----------
    body : Stmt
        A lowered function: flat buffers, cluster barriers as calls.

    Returns
    -------
    tuple[SharedMemoryPlan, dict]
        The plan, and the byte offset of each buffer variable.

    Notes
    -----
    Greedy by size, first fit among the buffers whose intervals overlap.
    """
    intervals = _Intervals(body).found
    order = sorted(intervals, key=lambda each: (-size_in_bytes(each), str(each.name)))
    placements: list[Placement] = []
    offsets: dict[Any, int] = {}
    for buffer in order:
        first, last = intervals[buffer]
        size = size_in_bytes(buffer)
        rivals = [each for each in placements if each.first <= last and first <= each.last]
        offsets[buffer] = first_fit(size, alignment(buffer), rivals)
        placements.append(Placement(str(buffer.name), offsets[buffer], size, first, last))
    total = max((each.offset + each.size for each in placements), default=0)
    return SharedMemoryPlan(tuple(placements), total), offsets


def first_fit(size: int, align: int, rivals: list[Placement]) -> int:
    """Lowest aligned offset at which `size` bytes are clear of all `rivals`."""
    offset = 0
    for rival in sorted(rivals, key=lambda each: each.offset):
        if offset + size <= rival.offset:
            break
        end = rival.offset + rival.size
        offset = max(offset, (end + align - 1) // align * align)
    return offset


def alignment(buffer: Any) -> int:
    """Bytes to which the start of a buffer is aligned."""
    return max(ALIGNMENT, int(buffer.data_alignment))


def element_bits(buffer: Any) -> int:
    """Bits of one element, all lanes of a vector together."""
    dtype = ir.tvm.DataType(str(buffer.ty.dtype))
    return int(dtype.bits * dtype.lanes)


def size_in_bytes(buffer: Any) -> int:
    """Bytes of a buffer of constant shape."""
    bits = element_bits(buffer)
    for extent in buffer.ty.shape:
        bits *= int(extent)
    return (bits + 7) // 8


class _Intervals:
    """Numbers the stretches between cluster barriers, and finds in which a buffer is used.

    `found` maps each allocated shared buffer to the first and last number. A loop with a barrier
    is one stretch, as the end of an iteration runs into the start of the next. A barrier that may
    not be executed, in a conditional or a loop of unknown extent, separates nothing outside.
    """

    def __init__(self, body: Any) -> None:
        self.found: dict[Any, tuple[int, int]] = {}
        self.owners: dict[Any, Any] = {}
        self.now = 0

        def allocate(node: Any) -> None:
            if str(node.buffer.scope()) in SCOPES:
                self.owners[node.buffer] = node.buffer

        ir.walk(body, (ir.AllocBuffer, allocate))
        self._visit(body)

    def _visit(self, node: Any) -> None:
        if isinstance(node, ir.AllocBuffer):
            return
        if is_barrier(node):
            self.now += 1
            return
        if isinstance(node, (ir.DeclBuffer, ir.Bind)):
            self._alias(node)
        start = self.now
        for expression in (*evaluated(node), *_subjects(node)):
            self._touch(expression, start, start)
        for child in children(node):
            self._visit(child)
        if self.now > start and isinstance(node, (ir.For, ir.tirx.While, ir.IfThenElse)):
            self._touch(node, start, self.now)
            if not _is_executed(node):
                self.now = start

    def _alias(self, node: Any) -> None:
        """A view, or a pointer that was given a name, stands for the buffer it points to."""
        made, source = (
            (node.buffer, node.data) if isinstance(node, ir.DeclBuffer) else (node.var, node.value)
        )
        if isinstance(node, ir.Bind) and not _is_pointer(made):
            return
        for variable in ir.variables(source):
            if variable in self.owners:
                self.owners[made] = self.owners[variable]

    def _touch(self, node: Any, first: int, last: int) -> None:
        for variable in ir.variables(node):
            if variable in self.owners:
                buffer = self.owners[variable]
                low, high = self.found.get(buffer, (first, last))
                self.found[buffer] = (min(low, first), max(high, last))


def _is_executed(node: Any) -> bool:
    """Whether the body of a compound statement surely runs."""
    return isinstance(node, ir.For) and (ir.constant(node.extent) or 0) > 0


def _subjects(node: Any) -> list[Any]:
    """Buffers that a statement names without evaluating an expression of them."""
    return [node.buffer] if isinstance(node, ir.BufferStore) else []


def _is_pointer(variable: Any) -> bool:
    return not isinstance(variable.ty, ir.tvm.ir.PrimType)
