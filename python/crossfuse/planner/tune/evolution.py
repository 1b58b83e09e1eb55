"""Evolutionary search over the kernels of a chain."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from crossfuse.planner.tune.space import Space
from crossfuse.planner.tune.strategy import Model, Strategy

#: Share of proposals that are drawn at random from the better part of the estimate's ranking.
_STRAY = 0.1
_BETTER = 0.05


class Evolution(Strategy):
    """Mutations and crossovers of what was measured and of what is predicted to be fast.

    The first proposals are the best of each family by the estimate. Then a population of the
    fastest points measured and the best by the model lives through some generations, the fittest by
    the model staying. Of the proposals about half are the fittest of all, and half those next to
    what was measured to be fastest, so that a model that is wrong does not lead all of them astray.

    Parameters
    ----------
    space, model, seed
        See `Strategy`.
    population : int
        Points that live at once.
    generations : int
        Rounds of mutation between two proposals.
    """

    def __init__(
        self,
        space: Space,
        model: Model | None = None,
        seed: int = 0,
        *,
        population: int = 48,
        generations: int = 4,
    ) -> None:
        super().__init__(space, model, seed)
        self._population, self._generations = population, generations

    def choose(self, count: int) -> Iterable[int]:
        """See `Strategy`."""
        if not self.measured:
            return self.first_of_families()
        fittest = self._fittest(self._evolved())
        near = self._fittest(self._around(max(2, count // 2)))
        stray = self._strays(count)
        return _taken(count, fittest, near, stray, self.rng)

    def _elite(self, count: int) -> list[int]:
        """The fastest points measured."""
        works = [each for each, time in self.measured.items() if np.isfinite(time)]
        return sorted(works, key=self.measured.__getitem__)[:count]

    def _around(self, count: int) -> set[int]:
        """Everything one step away from the fastest."""
        return {to for each in self._elite(count) for to in self.space.moves(each).values()}

    def _evolved(self) -> set[int]:
        elite = self._elite(self._population // 3)
        ranked = [int(each) for each in self.space.order[: self._population]]
        strays = self._strays(self._population // 3)
        living = list(dict.fromkeys([*elite, *ranked, *strays]))[: 2 * self._population]
        seen = set(living)
        for _ in range(self._generations):
            children = {self._child(living, elite) for _ in range(self._population)}
            seen |= children
            pool = sorted({*living, *children})
            times = self.predict(pool)
            living = [pool[each] for each in np.argsort(times, kind="stable")[: self._population]]
        return seen

    def _child(self, living: list[int], elite: list[int]) -> int:
        draw = self.rng.integers
        # The earlier, the fitter: the lesser of two draws.
        one = living[int(min(draw(len(living), size=2)))]
        if self.rng.random() < 0.3:
            others = elite or living
            child = self.space.cross(one, others[int(draw(len(others)))])
            if child != one:
                return child
        ways = self.space.ways(one)
        to = self.space.follow(one, ways[int(draw(len(ways)))]) if ways else None
        return one if to is None else to

    def _fittest(self, points: set[int]) -> list[int]:
        fresh = sorted(each for each in points if self.is_new(each))
        times = self.predict(fresh)
        return [fresh[each] for each in np.argsort(times, kind="stable")]

    def _strays(self, count: int) -> list[int]:
        better = self.space.order[: max(count, int(_BETTER * len(self.space)))]
        return [int(each) for each in self.rng.permutation(better)[:count]]


def _taken(
    count: int, fittest: list[int], near: list[int], stray: list[int], rng: np.random.Generator
) -> list[int]:
    """Take from three lists in turn, by chance."""
    lists = [iter(each) for each in (fittest, near, stray)]
    shares = ((1 - _STRAY) / 2, (1 - _STRAY) / 2, _STRAY)
    drawn = rng.choice(3, size=3 * count, p=shares)
    found = dict.fromkeys(next(lists[each], -1) for each in drawn)
    return [each for each in [*found, *fittest, *near] if each >= 0]
