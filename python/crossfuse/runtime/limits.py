"""Checks of what a kernel image asks of a device, before anything is compiled or loaded."""

from __future__ import annotations

import re
from math import prod

from crossfuse.errors import LoweringRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.lower.image import ROW_COUNT, KernelImage, Launch
from crossfuse.runtime.cubin import Cubin
from crossfuse.runtime.resources import ResourceUsage

# Limits of compute capability 9.0 that every sm_90 device shares.
_GRID = (2**31 - 1, 65535, 65535)
_BLOCK_Z = 64
_REGISTER_UNIT = 256  # of one warp
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_image(image: KernelImage, device: Device) -> None:
    """Raise `LoweringRefused` for an image that cannot be launched, whatever its kernels do."""
    names = [buffer.name for buffer in image.memory]
    for name in (image.name, *names, *(launch.symbol for launch in image.launches)):
        if not _IDENTIFIER.fullmatch(name):
            raise _refused("image-name", image.name, repr(name), "a C identifier", "rename it")
    if len(set(names)) != len(names):
        raise _refused(
            "image-buffers", image.name, ", ".join(names), "distinct names", "rename the buffers"
        )
    if not image.launches:
        raise _refused("image-launches", image.name, "no launch", "at least 1", "bind its loops")
    for launch in image.launches:
        _check_arguments(image, launch)
        _check_launch(image, launch, device)


def check_resources(image: KernelImage, cubin: Cubin, device: Device) -> None:
    """Raise `LoweringRefused` for kernels that need more than one CTA of the device can have.

    That is shared memory or registers; a kernel that is missing from the cubin is refused too.
    """
    for launch in image.launches:
        usage = cubin.usage(launch.symbol)
        if usage is None:
            raise _refused(
                "image-symbol",
                f"kernel {launch.symbol!r} of {image.name}",
                "a cubin of " + (", ".join(r.kernel for r in cubin.resources) or "no kernel"),
                "a cubin with every launched kernel",
                'declare the kernel extern "C" __global__ in the CUDA text',
            )
        _check_usage(image, launch, usage, device)


def _check_arguments(image: KernelImage, launch: Launch) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    known = {each.name for each in image.memory} | {each.name for each in launch.tensor_maps}
    known |= {ROW_COUNT} if image.rows is not None else set()
    if unknown := [name for name in launch.arguments if name not in known]:
        raise _refused(
            "image-arguments",
            where,
            ", ".join(unknown),
            "names of buffers and tensor maps: " + ", ".join(sorted(known)),
            "add the missing buffers to the image",
        )


def _check_launch(image: KernelImage, launch: Launch, device: Device) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    extents = (*launch.grid, *launch.block, *launch.cluster)
    if min(extents) < 1 or any(n > top for n, top in zip(launch.grid, _GRID, strict=True)):
        raise _refused(
            "launch-grid",
            where,
            f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}",
            f"extents of at least 1 and a grid of at most {_GRID}",
            "change the tile sizes",
        )
    if prod(launch.block) > device.max_threads or launch.block[2] > _BLOCK_Z:
        raise _refused(
            "launch-block",
            where,
            f"block {launch.block}",
            f"{device.max_threads} threads, and {_BLOCK_Z} along z",
            "bind fewer threads",
        )
    if launch.cluster_size > device.max_cluster:
        raise _refused(
            "cluster-extent",
            where,
            f"cluster {launch.cluster}",
            f"{device.max_cluster} CTAs",
            "bind a smaller loop to the cluster",
        )
    if any(n % size for n, size in zip(launch.grid, launch.cluster, strict=True)):
        raise _refused(
            "cluster-extent",
            where,
            f"grid {launch.grid} with cluster {launch.cluster}",
            "a grid that is a multiple of the cluster along each axis",
            "count CTAs, not clusters, in the grid",
        )


def _check_usage(image: KernelImage, launch: Launch, usage: ResourceUsage, device: Device) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    shared = usage.static_shared_bytes + launch.dynamic_shared_bytes
    if shared > device.max_shared_bytes:
        raise _refused(
            "shared-memory",
            where,
            f"{shared} bytes ({usage.static_shared_bytes} static, "
            f"{launch.dynamic_shared_bytes} dynamic)",
            f"{device.max_shared_bytes} bytes of one CTA",
            "use smaller tiles or fewer pipeline stages",
        )
    threads = prod(launch.block)
    warp = -(-usage.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    if warp * -(-threads // 32) > device.registers:
        raise _refused(
            "registers",
            where,
            f"{usage.registers} registers in each of {threads} threads",
            f"{device.registers} registers of one CTA",
            "set launch bounds, bind fewer threads, or use smaller tiles",
        )


def _refused(rule: str, where: str, found: str, limit: str, instead: str) -> RefusedError:
    return refuse(LoweringRefused, rule, where, found=found, limit=limit, instead=instead)
