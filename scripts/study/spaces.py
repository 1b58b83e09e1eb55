"""Parts of the space of kernels that differ in what clusters are for, to tell what that is worth.

::

    all           every kernel
    no DSM        nothing passes through distributed shared memory: no reduction is summed over a
                  cluster, and no slices of the intermediate are gathered; CTAs of a cluster may
                  share what TMA loads
    no clusters   every CTA for itself

Each is a part of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from crossfuse.planner.families.registry import read_kernel
from crossfuse.planner.families.tiled import TiledKernel
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Flag
from crossfuse.planner.tune.kernel_space import KernelSpace

ALL, NO_DSM, NO_CLUSTERS = SPACES = ("all", "no DSM", "no clusters")


def exchanges(kernel: TileKernel) -> Flag:
    """Whether CTAs of a cluster read or write each other's shared memory, of one kernel or many.

    Tiles in global memory do where a reduction is split over the cluster; kernels that keep the
    intermediate in registers or in a cluster do wherever a cluster has more than one CTA.
    """
    if isinstance(kernel, TiledKernel):
        split = np.asarray(kernel.split, bool) | np.asarray(kernel.split2, bool)
        return split & np.asarray(kernel.cluster > 1)
    return kernel.cluster > 1


def spaces_of(family: str, tiles: Mapping[str, Any]) -> tuple[str, ...]:
    """The spaces that a kernel is in, by its tiles alone.

    Parameters
    ----------
    family, tiles
        See `crossfuse.planner.families.registry.read_kernel`.

    Returns
    -------
    tuple[str, ...]
        Some of `SPACES`, ``"all"`` among them.

    Raises
    ------
    PlanRefused
        An unknown family, or tiles of which a field is missing.
    """
    kernel = read_kernel(family, tiles)
    return tuple(each for each in SPACES if bool(np.all(_is_in(each, kernel))))


def points_of(space: KernelSpace, name: str) -> np.ndarray:
    """The points of one of `SPACES`, by estimated time."""
    masks = [np.broadcast_to(_is_in(name, each.kernels), each.size) for each in space.groups]
    inside = np.concatenate(masks)
    found: np.ndarray = space.order[inside[space.order]]
    return found


def _is_in(name: str, kernel: TileKernel) -> np.ndarray:
    if name == ALL:
        return np.asarray(True)
    return ~np.asarray(exchanges(kernel) if name == NO_DSM else kernel.cluster > 1)
