"""What a kernel takes of the device, and the bytes that it moves between levels."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.hardware import WARPGROUP, Device
from crossfuse.planner.kernels.every import Kernel, memories
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.tiled import TiledKernel


@dataclass(frozen=True)
class Resources:
    """One kernel of a candidate.

    Attributes
    ----------
    ctas : int
        Of the grid.
    cluster : int
        CTAs of a cluster.
    threads : int
        Of a CTA: warpgroups that multiply, and one that loads.
    shared_bytes : int
        Of a CTA.
    left_stages, right_stages : int
        Stages of the rings.
    sums : int
        Float32 registers of a thread that the widest phase sums in.
    busy : int
        SMs that have a CTA at the same time.
    """

    ctas: int
    cluster: int
    threads: int
    shared_bytes: int
    left_stages: int
    right_stages: int
    sums: int
    busy: int


def resources(kernel: Kernel, shape: Shape, device: Device) -> tuple[Resources, ...]:
    """What each kernel of one candidate takes."""
    size = int(kernel.cluster)
    found = []
    launched = kernel.clusters(shape, device)
    rooms = memories(kernel, shape, device)
    for phases, clusters, room in zip(kernel.kernels(shape), launched, rooms, strict=True):
        found.append(
            Resources(
                int(clusters) * size,
                size,
                WARPGROUP * (int(phases[0].warpgroups) + 1),
                int(room.size),
                int(room.left),
                int(room.right),
                max(int(each.sums) for each in phases),
                min(int(clusters), int(resident(device, size))) * size,
            )
        )
    return tuple(found)


def moved_bytes(kernel: Kernel, shape: Shape) -> dict[str, int]:
    """Bytes that one candidate moves through L2, and between the CTAs of clusters.

    Tiles count whole, also where they reach beyond a tensor, since that is what is asked for.
    """
    size = int(kernel.cluster)
    l2 = shape.m * (shape.l or shape.n) * shape.out
    dsm = 0
    for phase in kernel.phases(shape):
        ctas = int(phase.tiles) * size
        left = phase.left / phase.left_sharers
        right = phase.right / phase.right_sharers
        l2 += int(ctas * phase.steps * (left + right))
        if phase.gathers:
            dsm += ctas * (size - 1) * int(phase.rows * phase.columns) * shape.item
        if phase.split > 1:
            dsm += ctas * int(phase.received * (phase.split - 1) / phase.split)
    if isinstance(kernel, TiledKernel):
        l2 += shape.m * shape.n * shape.item if shape.l else 0
    elif kernel.parts > (1 if kernel.family == "dsm" else size):
        # Each part stores its sums, and all of them are read once.
        second = kernel.phases(shape)[-1]
        rows = min(int(second.rows), shape.m)
        l2 += 2 * int(second.tiles) * size * rows * int(second.columns) * 4
    return {"l2": l2, "dsm": dsm}
