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
from crossfuse.lower.kernel import children

#: Bytes; a swizzled or bulk access wants 128, everything else less.
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
    intervals = _intervals(body)
    order = sorted(intervals, key=lambda each: (-_bytes(each), str(each.name)))
    placements: list[Placement] = []
    offsets: dict[Any, int] = {}
    for buffer in order:
        first, last = intervals[buffer]
        offset = _first_fit(_bytes(buffer), first, last, placements)
        offsets[buffer] = offset
        placements.append(Placement(str(buffer.name), offset, _bytes(buffer), first, last))
    total = max((each.offset + each.size for each in placements), default=0)
    return SharedMemoryPlan(tuple(placements), total), offsets


def _first_fit(size: int, first: int, last: int, placed: list[Placement]) -> int:
    offset = 0
    rivals = [each for each in placed if each.first <= last and first <= each.last]
    for rival in sorted(rivals, key=lambda each: each.offset):
        if offset + size <= rival.offset:
            break
        end = rival.offset + rival.size
        offset = max(offset, (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
    return offset


def _bytes(buffer: Any) -> int:
    dtype = ir.tvm.DataType(str(buffer.ty.dtype))
    size = dtype.bits // 8 * dtype.lanes
    for extent in buffer.ty.shape:
        size *= int(extent)
    return size


def _intervals(body: Any) -> dict[Any, tuple[int, int]]:
    """Barrier intervals [first, last] in which each shared buffer is used."""
    allocated: list[Any] = []
    ir.walk(
        body,
        (
            ir.AllocBuffer,
            lambda node: allocated.append(node.buffer) if node.buffer.scope() in SCOPES else None,
        ),
    )
    found: dict[Any, tuple[int, int]] = {}
    counter = [0]

    def touch(node: Any, first: int, last: int) -> None:
        for variable in ir.variables(node):
            for buffer in allocated:
                if variable.same_as(buffer):
                    low, high = found.get(buffer, (first, last))
                    found[buffer] = (min(low, first), max(high, last))

    def visit(node: Any) -> None:
        if isinstance(node, ir.AllocBuffer):
            return
        if is_barrier(node):
            counter[0] += 1
            return
        inside = children(node)
        if not inside:
            touch(node, counter[0], counter[0])
            return
        start = counter[0]
        for child, _ in inside:
            visit(child)
        if isinstance(node, ir.For) and counter[0] > start:
            # The end of one iteration runs into the start of the next: one interval for all.
            touch(node, start, counter[0])
        elif isinstance(node, ir.IfThenElse):
            touch(node.condition, start, start)

    visit(body)
    return found
