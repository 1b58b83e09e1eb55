"""What all searches share: they propose points, are told what became of them, and never repeat."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from crossfuse.planner.tune.space import Space

#: Points of a family that may be among the first proposals.
_RANKS = 64


class Model(Protocol):
    """What predicts, and learns; see `crossfuse.planner.tune.cost_model.CostModel`."""

    def predict(self, space: Space, points: np.ndarray) -> np.ndarray:
        """Microseconds of points."""

    def update(
        self, space: Space, points: Sequence[int], microseconds: Sequence[float | None]
    ) -> None:
        """Learn from measurements; None of what did not work."""


class Prior:
    """The analytical estimate alone, which learns nothing."""

    def predict(self, space: Space, points: np.ndarray) -> np.ndarray:
        """Microseconds of points."""
        found: np.ndarray = space.prior[points]
        return found

    def update(
        self, space: Space, points: Sequence[int], microseconds: Sequence[float | None]
    ) -> None:
        """Nothing."""


class Strategy(ABC):
    """A search. Subclasses say in `choose` what to measure next.

    Parameters
    ----------
    space : Space
        Where to search.
    model : Model | None
        What predicts times; None for the analytical estimate.
    seed : int
        The same seed and the same measurements give the same proposals.
    """

    def __init__(self, space: Space, model: Model | None = None, seed: int = 0) -> None:
        self.space = space
        self.model = Prior() if model is None else model
        self.rng = np.random.default_rng(seed)
        #: Measured microseconds; infinite of what did not work.
        self.measured: dict[int, float] = {}
        self._proposed: set[int] = set()

    @property
    def best(self) -> int | None:
        """The fastest point that was measured."""
        works = [each for each, time in self.measured.items() if math.isfinite(time)]
        return min(works, key=self.measured.__getitem__, default=None)

    def propose(self, count: int) -> list[int]:
        """Points to measure: at most so many, none of them twice; none when all are used up."""
        chosen: list[int] = []
        for each in self.choose(min(count, len(self.space) - len(self._proposed))):
            if len(chosen) < count and each not in self._proposed:
                chosen.append(int(each))
                self._proposed.add(int(each))
        chosen += self._others(min(count, len(self.space)) - len(chosen))
        return chosen

    def observe(self, points: Sequence[int], microseconds: Sequence[float | None]) -> None:
        """Take note of measurements, also of points that another search proposed.

        Parameters
        ----------
        points : Sequence[int]
            What was measured.
        microseconds : Sequence[float | None]
            Times; None of what does not compile, hangs, dies or is wrong.
        """
        for point, time in zip(points, microseconds, strict=True):
            self.measured[int(point)] = math.inf if time is None else float(time)
            self._proposed.add(int(point))

    @abstractmethod
    def choose(self, count: int) -> Iterable[int]:
        """Points in the order in which they are wanted; some may be known."""

    def is_new(self, point: int) -> bool:
        """Whether a point was neither proposed nor measured."""
        return int(point) not in self._proposed

    def predict(self, points: Sequence[int] | np.ndarray) -> np.ndarray:
        """Microseconds of points, as the model has it."""
        given = np.asarray(points, np.int64)
        return self.model.predict(self.space, given) if given.size else np.zeros(0)

    def first_of_families(self) -> list[int]:
        """The best points by the estimate: the first of each family, the second of each, ..."""
        order = self.space.order
        ranks = []
        for group in self.space.groups:
            inside = order[(order >= group.first) & (order < group.first + group.size)]
            ranks += [
                (rank, self.space.prior[each], int(each))
                for rank, each in enumerate(inside[:_RANKS])
            ]
        return [point for _, _, point in sorted(ranks)]

    def _others(self, count: int) -> list[int]:
        """What is left, by the estimate, where a search has no more ideas."""
        found: list[int] = []
        if count <= 0:
            return found
        for each in self.space.order:
            if len(found) == count:
                break
            if self.is_new(each):
                found.append(int(each))
                self._proposed.add(int(each))
        return found
