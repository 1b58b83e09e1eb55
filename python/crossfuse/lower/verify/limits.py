"""Launch limits of compute capability 9.0."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.hardware import Device
from crossfuse.lower.kernel import ClusterKernel
from crossfuse.schedule.markers import DSM_DTYPES, MAX_CLUSTER, thread_tag

#: CTAs along each axis of a grid (CUDA C++ Programming Guide, technical specifications).
MAX_GRID = {"x": 2**31 - 1, "y": 65535, "z": 65535}
MAX_THREADS = Device("").max_threads


def check_limits(kernel: ClusterKernel) -> None:
    """Cluster size, grid extents, threads of a CTA, element types of slabs.

    Raises
    ------
    LoweringRefused
        Naming the extents and what to split.
    """
    shape = " x ".join(f"{axis}={extent}" for axis, extent in kernel.cluster.items())
    if kernel.size > MAX_CLUSTER:
        raise refuse(
            LoweringRefused,
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
                LoweringRefused,
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
                LoweringRefused,
                "shared.dsm",
                f"buffer '{buffer.name}'",
                found=f"element type {buffer.ty.dtype}",
                limit=", ".join(DSM_DTYPES),
                instead="exchange the tile in one of these types",
            )


def _check_threads(kernel: ClusterKernel) -> None:
    threads: dict[str, int] = {}

    def visit(loop: Any) -> None:
        tag = thread_tag(loop)
        if tag.startswith("threadIdx."):
            threads[tag] = max(threads.get(tag, 1), ir.constant(loop.extent) or 1)

    ir.walk(kernel.body, (ir.For, visit))
    if prod(threads.values()) > MAX_THREADS:
        extents = ", ".join(f"{tag}={extent}" for tag, extent in sorted(threads.items()))
        raise refuse(
            LoweringRefused,
            "threads",
            "kernel",
            found=f"{prod(threads.values())} threads ({extents})",
            limit=f"{MAX_THREADS} threads in a CTA",
            instead="split the loops bound to threadIdx by smaller factors",
        )
