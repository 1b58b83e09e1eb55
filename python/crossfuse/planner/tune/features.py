"""Features of the points of a search space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.features import NAMES
from crossfuse.planner.cost.features import features as features_of
from crossfuse.planner.kernels.every import memories, select
from crossfuse.planner.tune.kernel_space import KernelSpace
from crossfuse.planner.tune.space import Space


def features(space: Space, points: Sequence[int] | np.ndarray) -> np.ndarray:
    """Describe kernels by numbers.

    Parameters
    ----------
    space : Space
        Whose points they are: a `KernelSpace`; kernels of cascades have no features.
    points : Sequence[int]
        Which.

    Returns
    -------
    np.ndarray
        float32 of [point, name], see `crossfuse.planner.cost.features`.
    """
    assert isinstance(space, KernelSpace), "cascades are searched without a model"
    found = np.zeros((len(points), len(NAMES)), np.float32)
    given = np.asarray(points, np.int64)
    shape, device = space.shape, space.device
    for group, here in space.by_group(given):
        kernel = select(group.kernels, given[here] - group.first)
        room = memories(kernel, shape, device)[-1]
        times = estimate(kernel, shape, device, space.rates, room)
        found[here] = features_of(kernel, shape, device, times, room)
    return found
