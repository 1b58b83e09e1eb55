"""Searches that learn nothing from what they measure, for comparison."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from crossfuse.planner.tune.space import Space
from crossfuse.planner.tune.strategy import Model, Strategy


class RandomSearch(Strategy):
    """Points drawn uniformly from each family in turn, so that large ones do not crowd others."""

    def choose(self, count: int) -> Iterable[int]:
        """See `Strategy`."""
        groups = self.space.groups
        for _ in range(64 * count):
            group = groups[int(self.rng.integers(len(groups)))]
            yield group.first + int(self.rng.integers(group.size))


class ModelOnly(Strategy):
    """The points with the least time as it was predicted at first; measurements confirm them."""

    def __init__(self, space: Space, model: Model | None = None, seed: int = 0) -> None:
        super().__init__(space, model, seed)
        self._order = np.argsort(self.predict(np.arange(len(space))), kind="stable")

    def choose(self, count: int) -> Iterable[int]:
        """See `Strategy`."""
        fresh = (int(each) for each in self._order if self.is_new(each))
        return islice(fresh, count)
