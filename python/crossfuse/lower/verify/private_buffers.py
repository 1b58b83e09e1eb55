"""Buffers that CTAs or threads have copies of must not carry values from one to another."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel, Part
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access, children, coordinate
from crossfuse.lower.verify.ownership import extents, stray_access
from crossfuse.markers import DSM_SCOPE, MERGED, marked_blocks_in


def check_private_buffers(kernel: ClusterKernel, part: Part) -> None:
    """Every element of a private buffer is touched by one CTA (of registers, by one thread).

    Sequentially there is one such buffer; on the chip every CTA has its own, and a value written
    by rank 0 does not appear in the copy of rank 1. Where a buffer is allocated inside the loop
    over CTAs, there is nothing to check; elsewhere, a function of the index must tell the CTA.
    The rank of a `shared.dsm` buffer tells its cluster axis.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel, its loops as they were scheduled.
    part : Part
        The kernel with the buffers of the root block that it holds.

    Raises
    ------
    LoweringRefused
        Naming the buffer, the coordinate and a statement.
    """
    for buffer, outside in _allocations(part).items():
        is_slab = buffer.scope() == DSM_SCOPE
        if buffer.scope() == "global" or (is_slab and buffer not in kernel.buffers):
            continue  # a buffer that is no slab of any axis is refused when its shape is known
        mine = [each for each in kernel.uses if each.buffer.same_as(buffer)]
        for tag in _shared_coordinates(kernel, buffer, mine, outside):
            stray = stray_access([_below(each, outside) for each in mine], tag)
            if stray is not None:
                raise _refuse(buffer, tag, stray)


def _allocations(part: Part) -> dict[Any, tuple[Any, ...]]:
    """Buffers of a kernel, each with the loops around its allocation."""
    found: dict[Any, tuple[Any, ...]] = dict.fromkeys(part.buffers, ())

    def visit(node: Any, loops: tuple[Any, ...]) -> None:
        if isinstance(node, ir.SBlock):
            found.update(dict.fromkeys(node.alloc_buffers, loops))
        inside = (*loops, node) if isinstance(node, ir.For) else loops
        for child in children(node):
            visit(child, inside)

    visit(part.body, ())
    return found


def _shared_coordinates(
    kernel: ClusterKernel, buffer: Any, mine: list[Access], outside: tuple[Any, ...]
) -> list[str]:
    """Coordinates of whose places each has a copy, and that write between them."""
    written: dict[str, int | None] = {}
    for access in mine:
        if access.write:
            written |= extents(_below(access, outside).loops)
    axis = kernel.buffers.get(buffer)
    equal = _is_allreduced(kernel, buffer) or _is_merged(kernel, buffer)
    by_thread = str(buffer.scope()) == "local" and not equal
    return [
        tag
        for tag in sorted(written)
        if tag != f"cluster.{axis}"
        and (by_thread or not tag.startswith("threadIdx."))
        and not tag.startswith("vthread")
    ]


def _is_allreduced(kernel: ClusterKernel, buffer: Any) -> bool:
    """Whether TVM made a register of a thread for a reduction over threads."""
    found: list[Any] = []

    def visit(call: Any) -> None:
        if isinstance(call.op, ir.Op) and call.op.name == "tirx.tvm_thread_allreduce":
            found.extend(ir.variables(call))

    ir.walk(kernel.body, (ir.Call, visit))
    return any(variable.same_as(buffer) for variable in found)


def _is_merged(kernel: ClusterKernel, buffer: Any) -> bool:
    """Whether all threads end with equal registers, see `lower_merges`."""
    return any(
        written.source.same_as(buffer)
        for block in marked_blocks_in(kernel.body, MERGED)
        for written in block.writes
    )


def _below(access: Access, outside: tuple[Any, ...]) -> Access:
    """The access without the bindings of loops around the allocation."""
    inner = tuple(
        each
        for each in access.site.path
        if not (isinstance(each, ir.For) and coordinate(each) and _among(each, outside))
    )
    site = type(access.site)(access.site.node, inner)
    return Access(access.buffer, access.indices, access.read, access.write, site)


def _among(loop: Any, loops: tuple[Any, ...]) -> bool:
    return any(each.loop_var.same_as(loop.loop_var) for each in loops)


def _refuse(buffer: Any, tag: str, stray: Access) -> Exception:
    who = "thread" if tag.startswith("threadIdx.") else "CTA"
    return refuse(
        "private-buffer",
        f"buffer '{buffer.name}'",
        found=f"a {buffer.scope()} buffer written along {tag} and an access that may be to "
        f"another {who}'s element: {stray.site.text}",
        limit=f"each {who} has a copy of its own",
        instead="compute the buffer at the loop that uses it, inside the bound loop, or exchange "
        "it with dsm_reduce or dsm_shuffle",
    )
