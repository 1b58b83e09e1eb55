"""Which rows, columns and share of the reduction each CTA of a cluster has, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.planner.kernels.clustered import ClusteredKernel
from crossfuse.planner.kernels.every import Kernel
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.shape import Shape

#: From the first one to the one after the last.
Range = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """What one CTA of the first cluster computes of its first tile.

    Attributes
    ----------
    phase : int
        0 for the first products, 1 for the second product.
    cta : int
        Rank in the cluster.
    rows, columns : tuple[int, int]
        Of the phase's output, clipped to it; empty where a tile lies beyond.
    reduction : tuple[int, int]
        Of what it sums.
    """

    phase: int
    cta: int
    rows: Range
    columns: Range
    reduction: Range


def layout(kernel: Kernel, shape: Shape) -> tuple[Share, ...]:
    """Say what the CTAs of the first cluster have, of one candidate.

    Ranks count along the cluster's first axis, then along its second one, as the schedule rules
    bind them.
    """
    return tuple(
        _share(kernel, shape, phase, cta)
        for phase in range(len(kernel.phases(shape)))
        for cta in range(int(kernel.cluster))
    )


def _share(kernel: Kernel, shape: Shape, phase: int, cta: int) -> Share:
    row, column, part = _place(kernel, phase, cta)
    found = kernel.phases(shape)[phase]
    summed = shape.n if phase else shape.k
    width = shape.l if phase else shape.n
    step = int(found.steps * found.depth)
    return Share(
        phase,
        cta,
        _range(row, int(found.rows), shape.m),
        _range(column, int(found.columns), width),
        _range(part, step, summed),
    )


def _place(kernel: Kernel, phase: int, cta: int) -> tuple[int, int, int]:
    """Row and column of a CTA's tile, and its share of the reduction."""
    if isinstance(kernel, ClusteredKernel):
        return 0, cta, 0
    if isinstance(kernel, RegisterKernel):
        return (0, 0, cta) if phase else (0, cta, 0)
    size = int(kernel.size)
    first, second = cta % size, cta // size
    if kernel.split2 if phase else kernel.split:
        return 0, second, first
    if phase or kernel.stacked:
        return first, second, 0
    return 0, cta, 0


def _range(index: int, size: int, extent: int) -> Range:
    return min(index * size, extent), min((index + 1) * size, extent)
