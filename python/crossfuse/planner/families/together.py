"""Tiles of several products of the same rows in one kernel of the Hopper pipeline.

They are those of a product with the columns of all, each rounded up to whole tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from crossfuse.hardware import Device, device
from crossfuse.planner.cost.estimate import fastest
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.skinny import together
from crossfuse.planner.families.tiled import GEMM, GemmKernel
from crossfuse.planner.kernels.shape import Shape, count, select


def together_kernels(
    shapes: Sequence[Shape], target: Device | None = None
) -> list[tuple[GemmKernel, Shape]]:
    """The fastest tiles of each number of columns, the fastest first, with what they compute."""
    spec = target or device()
    wide, rates = together(shapes), rates_of(spec)
    every: Any = GEMM.every(wide, spec)
    every = select(every, (every.split == 0) & (every.columns <= min(each.n for each in shapes)))
    found = []
    for columns in np.unique(every.columns) if count(every) else ():
        of = replace(wide, n=sum(int(columns) * ceil(each.n / columns) for each in shapes))
        few = select(every, every.columns == columns)
        order, times = fastest(few, of, spec, rates, 1)
        found.append((float(times[0]), select(few, int(order[0])), of))
    return [(kernel, of) for _, kernel, of in sorted(found, key=lambda each: each[0])]
