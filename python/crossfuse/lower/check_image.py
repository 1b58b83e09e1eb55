"""What a lowered function must keep to: its own buffers, and the limits of the device."""

from __future__ import annotations

from crossfuse.hardware import Device
from crossfuse.lower.image import KernelImage
from crossfuse.lower.place_shared_memory import check_budget
from crossfuse.lower.refusal import refuse
from crossfuse.lower.shared_memory_plan import SharedMemoryPlan


def check_image(image: KernelImage) -> None:
    """Kernels get the function's buffers and nothing else."""
    names = [buffer.name for buffer in image.memory]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refuse(
            "lower",
            f"parameter '{twice}'",
            found="two parameters of one name",
            limit="parameters told apart by their names",
            instead="give each buffer of the function a name of its own",
        )
    for launch in image.launches:
        for name in launch.arguments:
            if name not in names:
                raise refuse(
                    "lower",
                    f"kernel '{launch.symbol}'",
                    found=f"argument '{name}', which is no parameter of the function",
                    limit=f"kernels on the function's own buffers ({', '.join(names)})",
                    instead="pass an intermediate between two kernels as a parameter, or keep it "
                    "inside one kernel",
                )


def check_device(image: KernelImage, placements: SharedMemoryPlan, spec: Device) -> None:
    """Launches stay within what this device allows."""
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
