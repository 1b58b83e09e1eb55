"""Checks of a scheduled function's form: loops, threads, vectors, limits of the device."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import Device
from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import children, coordinate, evaluated, sites
from crossfuse.markers import (
    AXES,
    DSM_DTYPES,
    MAX_CLUSTER,
    NAIVE_TAGS,
    ROW_COUNTS,
    ROWS,
    cluster_axis,
    marked_blocks,
    staged_blocks,
    thread_tag,
)


def check_structure(func: Any) -> None:
    """Loops are bound to clusters by `cluster_bind`, and no block uses two loops of one coordinate.

    On the function as it was scheduled, so that an error names the user's loop.
    """
    _visit(func.body, ())


def _visit(node: Any, bound: tuple[Any, ...]) -> None:
    if isinstance(node, ir.For) and coordinate(node):
        _check_mark(node)
        _check_twice(node, [each for each in bound if coordinate(each) == coordinate(node)])
        bound = (*bound, node)
    elif isinstance(node, ir.SBlockRealize):
        _check_diagonal(node, bound)
    for child in children(node):
        _visit(child, bound)


def _check_mark(loop: Any) -> None:
    tag, axis = thread_tag(loop), cluster_axis(loop)
    if tag in NAIVE_TAGS:
        raise refuse(
            "cluster-binding",
            f"loop '{loop.loop_var.name}'",
            found=f"a plain bind to {tag}",
            limit="TVM launches too few CTAs for it and gives each the shared tiles of all",
            instead=f'call sch.cluster_bind(loop, axis="{tag[-1]}") instead of '
            f'sch.bind(loop, "{tag}")',
        )
    if axis is not None and axis not in AXES:
        raise refuse(
            "cluster-binding",
            f"loop '{loop.loop_var.name}'",
            found=f"the annotation of an axis '{axis}'",
            limit=f"axes {', '.join(AXES)}",
            instead='call sch.cluster_bind(loop, axis="x") instead of sch.annotate',
        )


def _check_twice(loop: Any, around: list[Any]) -> None:
    """A loop may be bound to threads again inside their own, to load together; not so to CTAs."""
    for outer in around:
        extents = ir.constant(outer.extent), ir.constant(loop.extent)
        if cluster_axis(loop) is not None:
            raise _refuse_twice(loop, outer, "")
        if extents[0] != extents[1]:
            raise _refuse_twice(loop, outer, f", with extents {extents[0]} and {extents[1]}")


def _check_diagonal(realize: Any, bound: tuple[Any, ...]) -> None:
    """A block that uses two loops of one coordinate would run only where both are equal."""
    used = {var for each in evaluated(realize) for var in ir.variables(each)}
    seen: dict[str, Any] = {}
    for loop in bound:
        if loop.loop_var not in used or ir.constant(loop.extent) == 1:
            continue
        outer = seen.setdefault(coordinate(loop), loop)
        if not outer.same_as(loop):
            raise _refuse_twice(loop, outer, f", and block '{realize.block.name_hint}' uses both")


def _refuse_twice(loop: Any, outer: Any, why: str) -> Exception:
    axis = cluster_axis(loop)
    place = coordinate(loop) if axis is None else f"cluster axis {axis}"
    return refuse(
        "thread-binding" if axis is None else "cluster-binding",
        f"loop '{loop.loop_var.name}'",
        found=f"loop '{outer.loop_var.name}' of {place} around it{why}",
        limit=f"one loop a nest on each {'coordinate' if axis is None else 'cluster axis'}",
        instead="bind one of them to another axis, or fuse the two and bind that",
    )


# Launch limits of compute capability 9.0.

#: CTAs along each axis of a grid (CUDA C++ Programming Guide, technical specifications).
MAX_GRID = {"x": 2**31 - 1, "y": 65535, "z": 65535}
MAX_THREADS = Device("").max_threads


def check_limits(kernel: ClusterKernel) -> None:
    """Cluster size, grid extents, threads of a CTA and types of slabs are within the limits."""
    shape = " x ".join(f"{axis}={extent}" for axis, extent in kernel.cluster.items())
    if kernel.size > MAX_CLUSTER:
        raise refuse(
            "cluster-size",
            "kernel",
            found=f"{kernel.size} CTAs in a cluster ({shape})",
            limit=f"{MAX_CLUSTER} CTAs",
            instead="bind smaller loops to the cluster axes",
        )
    for axis, limit in MAX_GRID.items():
        ctas = kernel.grid.get(axis, 1) * kernel.cluster.get(axis, 1)
        if ctas > limit:
            raise refuse(
                "grid-size",
                f"blockIdx.{axis}",
                found=f"{ctas} CTAs",
                limit=f"{limit} CTAs along {axis}",
                instead="bind the large loop to blockIdx.x",
            )
    _check_threads(kernel)
    for buffer in kernel.buffers:
        if str(buffer.ty.dtype) not in DSM_DTYPES:
            raise refuse(
                "shared.dsm",
                f"buffer '{buffer.name}'",
                found=f"element type {buffer.ty.dtype}",
                limit=", ".join(DSM_DTYPES),
                instead="exchange the tile in one of these types",
            )


def _check_threads(kernel: ClusterKernel) -> None:
    count = prod(kernel.threads.values())
    if count > MAX_THREADS:
        extents = ", ".join(f"threadIdx.{axis}={n}" for axis, n in sorted(kernel.threads.items()))
        raise refuse(
            "threads",
            "kernel",
            found=f"{count} threads ({extents})",
            limit=f"{MAX_THREADS} threads in a CTA",
            instead="split the loops bound to threadIdx by smaller factors",
        )


# Vectors that TVM's CUDA code generator has no type for.

#: Elements that lie apart in memory, accessed together. The generator makes a vector of eight
#: with eight arguments of a constructor that takes four: that does not compile.
MAX_APART = 4


def check_vectors(func: Any) -> None:
    """No access gathers more elements than CUDA has a vector for.

    A contiguous access of any width has one index, its first; a vectorised loop that runs over the
    end of a row, or over rows, has one for each element.
    """
    for site in sites(func.body):
        stored = [*site.node.indices] if isinstance(site.node, ir.BufferStore) else []
        gathered = _gathered(evaluated(site.node))
        scattered = max([0, *(_lanes_apart(each) for each in stored)])
        of_fp8 = scattered and str(site.node.buffer.ty.dtype).startswith("float8")
        limit = 1 if of_fp8 else MAX_APART
        lanes = max(gathered, scattered)
        if lanes > limit:
            raise refuse(
                "vectors",
                f"statement {site.text}",
                found=f"a vector of {lanes} elements that lie apart in memory",
                limit=f"{limit} in CUDA generated by TVM",
                instead=("vectorise by 4 or less" if limit > 1 else "leave the loop serial")
                + ", or vectorise by a number of elements that divides the rows that are copied",
            )


def _gathered(expressions: list[Any]) -> int:
    """Lanes of the widest load of elements that lie apart, or of arithmetic on their indices."""
    found = [0]
    for expression in expressions:
        for load in ir.nodes(expression, ir.TensorLoad):
            found += map(_lanes_apart, load.indices)
        for broadcast in ir.nodes(expression, ir.tirx.Broadcast):
            if str(broadcast.value.ty) in ("int32", "uint32"):
                found.append(int(broadcast.lanes))
    return max(found)


def _lanes_apart(index: Any) -> int:
    """Lanes of a vector of indices; 0 for one index, or for neighbours in memory."""
    if isinstance(index, ir.tirx.Ramp) and ir.constant(index.stride) == 1:
        return 0
    lanes = int(ir.tvm.DataType(str(index.ty)).lanes)
    return lanes if lanes > 1 else 0


_TAG = "vthread"


def check_virtual_threads(kernel: ClusterKernel) -> None:
    """Every store stands inside the virtual threads of its kernel.

    TVM draws a ``vthread`` loop around the whole kernel and repeats for each what stands outside
    it; an accumulation would be done several times. Buffers are not compacted yet.
    """
    tags = {
        thread_tag(loop)
        for use in kernel.uses
        for loop in use.loops
        if thread_tag(loop).startswith(_TAG)
    }
    for tag in sorted(tags):
        for use in kernel.uses:
            if use.write and tag not in map(thread_tag, use.loops):
                raise refuse(
                    "virtual-threads",
                    f"buffer '{use.buffer.name}', statement {use.site.text}",
                    found=f"a store outside {tag}, which other statements of the kernel have",
                    limit="TVM runs the whole kernel in each virtual thread",
                    instead=f"bind a loop around every statement to {tag}, or leave them serial",
                )


def check_grid_stage(function: Any) -> None:
    """Refuse a staged intermediate in a function that has no pipelined loop.

    General kernels have no flags by which CTAs could wait for each other's stores.
    """
    for block in staged_blocks(function):
        raise refuse(
            "grid-stage",
            f"block '{block.name_hint}'",
            found="an intermediate that stays in L2, in a kernel of the general lowering",
            limit="kernels of the Hopper pipeline, in which CTAs tell each other what is stored",
            instead="schedule both products with stages (crossfuse.schedule.rules.tiled_ffn), or "
            "leave grid_stage out",
        )


def takes_fewer_rows(func: Any) -> bool:
    """Whether `accept_fewer_rows` was called for a function.

    Refuses a mark with another value, or on another block than the root.
    """
    marked = marked_blocks(func, ROWS)
    root = getattr(func.body, "block", None)
    for block in marked:
        value = str(block.annotations[ROWS])
        if value not in ROW_COUNTS or not block.same_as(root):
            raise refuse(
                ROWS,
                f"block '{block.name_hint}'",
                found=f"'{value}'",
                limit=f"{' or '.join(map(repr, ROW_COUNTS))} of the root block",
                instead="call sch.accept_fewer_rows()",
            )
    return bool(marked)
