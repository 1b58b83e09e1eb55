"""Launch limits of compute capability 9.0."""

from __future__ import annotations

from math import prod

from crossfuse.hardware import Device
from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.markers import DSM_DTYPES, MAX_CLUSTER

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
