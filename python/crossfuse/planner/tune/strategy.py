"""Searches: they propose points, learn from their measurements, and never propose one twice."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.tune.cost_model import CostModel
from crossfuse.planner.tune.kernel_space import Move, Space

#: Points of a family that may be among the first proposals.
_RANKS = 64


class Strategy(ABC):
    """A search. Subclasses decide in `choose` what to measure next.

    Without a model, the analytical estimate predicts. The same seed and the same measurements give
    the same proposals.
    """

    def __init__(self, space: Space, model: CostModel | None = None, seed: int = 0) -> None:
        self.space = space
        self.model = model
        self.rng = np.random.default_rng(seed)
        #: Measured microseconds; infinite of what did not work.
        self.measured: dict[int, float] = {}
        self._proposed: set[int] = set()

    @property
    def working(self) -> list[int]:
        """Points that were measured and work, the fastest first."""
        works = [each for each, time in self.measured.items() if math.isfinite(time)]
        return sorted(works, key=self.measured.__getitem__)

    @property
    def best(self) -> int | None:
        """The fastest point that was measured."""
        return next(iter(self.working), None)

    def propose(self, count: int) -> list[int]:
        """Propose at most `count` points to measure, none of them twice; none when all are used."""
        chosen: list[int] = []
        for each in self.choose(min(count, len(self.space) - len(self._proposed))):
            if len(chosen) < count and each not in self._proposed:
                chosen.append(int(each))
                self._proposed.add(int(each))
        chosen += self._others(min(count, len(self.space)) - len(chosen))
        return chosen

    def observe(self, points: Sequence[int], microseconds: Sequence[float | None]) -> None:
        """Record measurements, even of points that another search proposed.

        A time is None if the point does not compile, hangs, dies or is wrong.
        """
        for point, time in zip(points, microseconds, strict=True):
            self.measured[int(point)] = math.inf if time is None else float(time)
            self._proposed.add(int(point))

    def learn(self, points: Sequence[int], microseconds: Sequence[float | None]) -> None:
        """Record measurements, see `observe`, and let the model learn from them."""
        self.observe(points, microseconds)
        if self.model is not None:
            self.model.update(self.space, points, microseconds)

    @abstractmethod
    def choose(self, count: int) -> Iterable[int]:
        """List points in the order in which they are wanted; some may be known."""

    def is_new(self, point: int) -> bool:
        """Whether a point was neither proposed nor measured."""
        return int(point) not in self._proposed

    def predict(self, points: Sequence[int] | np.ndarray) -> np.ndarray:
        """Predict the microseconds of points by the model."""
        given = np.asarray(points, np.int64)
        if self.model is not None and given.size:
            return self.model.predict(self.space, given)
        found: np.ndarray = self.space.prior[given]
        return found

    def first_of_families(self) -> list[int]:
        """Rank points by the estimate: the first of each family, the second of each, ..."""
        ranks = []
        for group in self.space.groups:
            ranks += [
                (rank, self.space.prior[each], each)
                for rank, each in enumerate(self.space.ranked(group, _RANKS))
            ]
        return [point for _, _, point in sorted(ranks)]

    def _others(self, count: int) -> list[int]:
        """List what is left, by the estimate, where a search has no more ideas."""
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


# Simulated annealing whose moves are chosen by what moves of their kind have gained.

#: Measurements that the model's opinion of a move counts as.
_TRUST = 1.0
#: What a failure counts as, as the logarithm of a time: e times as long.
_FAILURE = -1.0
#: T at first, and its factor from one proposal to the next.
_TEMPERATURE, _COOLING = 0.05, 0.97
#: Chances of a direction at random, and of a new start.
_CURIOSITY, _RESTART = 0.15, 0.25


class Annealing(Strategy):
    """Walks from points that were measured, in directions that have paid.

    As FlexTensor does (Zheng et al., ASPLOS 2020, section 5.1): a starting point is drawn from all
    that were measured, with probability exp(-(t - best) / (best T)), and the direction that is
    expected to gain most is taken, or now and then one at random; T falls with each proposal.
    Sometimes the best point by the estimate of those that are left starts anew instead. The gain of
    a direction is learned from measurements: here a table of mean gains (logarithms of times before
    and after) for each family, field and way, that begins with what the model expects of the step.
    """

    def __init__(self, space: Space, model: CostModel | None = None, seed: int = 0) -> None:
        super().__init__(space, model, seed)
        self._temperature = _TEMPERATURE
        self._gains: dict[Move, tuple[float, int]] = {}
        self._from: dict[int, tuple[int, Move]] = {}

    def choose(self, count: int) -> Iterable[int]:
        """See `Strategy`."""
        if not self.measured:
            yield from self.first_of_families()
            return
        taken: set[int] = set()
        for _ in range(8 * count):
            if len(taken) == count:
                return
            if self.rng.random() < _RESTART:
                fresh = self._fresh(taken)
                taken |= set(fresh)
                yield from fresh
                continue
            self._temperature *= _COOLING
            start = self._start()
            step = None if start is None else self._step(start, taken)
            if start is None or step is None:
                continue
            move, to = step
            self._from[to] = (start, move)
            taken.add(to)
            yield to

    def observe(self, points: Sequence[int], microseconds: Sequence[float | None]) -> None:
        """Record measurements, and what the moves to them have gained."""
        super().observe(points, microseconds)
        for each in points:
            if each not in self._from:
                continue
            start, move = self._from.pop(each)
            before, after = self.measured[start], self.measured[each]
            gain = math.log(before / after) if math.isfinite(after) else _FAILURE
            total, times = self._gains.get(move, (0.0, 0))
            self._gains[move] = (total + gain, times + 1)

    def expected(self, move: Move, predicted: float) -> float:
        """Expected gain of a kind of step, as a logarithm, if the model expects `predicted`."""
        total, times = self._gains.get(move, (0.0, 0))
        return (_TRUST * predicted + total) / (_TRUST + times)

    def _fresh(self, taken: set[int]) -> list[int]:
        """Find the best point by the estimate that is neither known nor taken."""
        order = (int(each) for each in self.space.order)
        return list(islice((each for each in order if self.is_new(each) and each not in taken), 1))

    def _start(self) -> int | None:
        works = [each for each, time in self.measured.items() if math.isfinite(time)]
        if not works:
            return None
        times = np.array([self.measured[each] for each in works])
        best = times.min()
        weights = np.exp(-(times - best) / (best * max(self._temperature, 1e-3)))
        return works[int(self.rng.choice(len(works), p=weights / weights.sum()))]

    def _step(self, start: int, taken: set[int]) -> tuple[Move, int] | None:
        steps = [
            (move, to)
            for move, to in self.space.moves(start).items()
            if self.is_new(to) and to not in taken
        ]
        if not steps:
            return None
        if self.rng.random() < _CURIOSITY:
            return steps[int(self.rng.integers(len(steps)))]
        times = self.predict([start, *(to for _, to in steps)])
        gains = np.log(times[0] / times[1:])
        values = [self.expected(move, gain) for (move, _), gain in zip(steps, gains, strict=True)]
        return steps[int(np.argmax(values))]


# Evolutionary search over the kernels of a chain.

#: Share of proposals that are drawn at random from the better part of the estimate's ranking.
_STRAY = 0.1
_BETTER = 0.05
#: Points that live, and how often they have children.
_POPULATION, _GENERATIONS = 48, 4


class Evolution(Strategy):
    """Mutations and crossovers of what was measured and of what is predicted to be fast.

    The first proposals are the best of each family by the estimate. Then a population of the
    fastest points measured and the best by the model lives through some generations, the fittest
    by the model staying. Of the proposals about half are the fittest of all, and half those next to
    what was measured to be fastest, so that a model that is wrong does not lead all of them astray.
    """

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
        return self.working[:count]

    def _around(self, count: int) -> set[int]:
        """All points one step away from the fastest."""
        return {to for each in self._elite(count) for to in self.space.moves(each).values()}

    def _evolved(self) -> set[int]:
        elite = self._elite(_POPULATION // 3)
        ranked = [int(each) for each in self.space.order[:_POPULATION]]
        strays = self._strays(_POPULATION // 3)
        living = list(dict.fromkeys([*elite, *ranked, *strays]))[: 2 * _POPULATION]
        seen = set(living)
        for _ in range(_GENERATIONS):
            children = {self._child(living, elite) for _ in range(_POPULATION)}
            seen |= children
            pool = sorted({*living, *children})
            times = self.predict(pool)
            living = [pool[each] for each in np.argsort(times, kind="stable")[:_POPULATION]]
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


# Searches that learn nothing from what they measure, for comparison.


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

    def __init__(self, space: Space, model: CostModel | None = None, seed: int = 0) -> None:
        super().__init__(space, model, seed)
        self._order = np.argsort(self.predict(np.arange(len(space))), kind="stable")

    def choose(self, count: int) -> Iterable[int]:
        """See `Strategy`."""
        fresh = (int(each) for each in self._order if self.is_new(each))
        return islice(fresh, count)


#: Searches by name.
STRATEGIES: dict[str, type[Strategy]] = {
    "evolution": Evolution,
    "annealing": Annealing,
    "random": RandomSearch,
    "model": ModelOnly,
}


def make_strategy(
    name: str, space: Space, model: CostModel | None = None, seed: int = 0
) -> Strategy:
    """Make a search of `STRATEGIES` by name."""
    if name not in STRATEGIES:
        raise refuse(
            PlanRefused,
            "strategy",
            "name of a search",
            found=repr(name),
            limit=", ".join(STRATEGIES),
            instead="name one of these",
        )
    return STRATEGIES[name](space, model, seed)
