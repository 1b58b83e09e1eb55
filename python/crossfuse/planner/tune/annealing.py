"""Simulated annealing whose moves are chosen by what moves of their kind have gained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from crossfuse.planner.tune.space import Move, Space
from crossfuse.planner.tune.strategy import Model, Strategy

#: Measurements that the model's opinion of a move counts as.
_TRUST = 1.0
#: What a failure counts as, as the logarithm of a time: e times as long.
_FAILURE = -1.0


class Annealing(Strategy):
    """Walks from points that were measured, in directions that have paid.

    As FlexTensor does (Zheng et al., ASPLOS 2020, section 5.1): a starting point is drawn from all
    that were measured, with probability exp(-(t - best) / (best T)), and the direction that is
    expected to gain most is taken, or one at random with some probability. What a direction gains
    is learned from measurements: here a table of mean gains (logarithms of times before and after)
    for each family, field and way, that begins with what the model expects of the step.

    Parameters
    ----------
    space, model, seed
        See `Strategy`.
    temperature : float
        Share of the best time; it falls by `cooling` with each proposal.
    cooling : float
        Factor.
    curiosity : float
        Probability of a random direction.
    restart : float
        Probability of a new starting point, the best by the estimate of those that are left,
        instead of a step.
    """

    def __init__(
        self,
        space: Space,
        model: Model | None = None,
        seed: int = 0,
        *,
        temperature: float = 0.05,
        cooling: float = 0.97,
        curiosity: float = 0.15,
        restart: float = 0.25,
    ) -> None:
        super().__init__(space, model, seed)
        self._temperature, self._cooling, self._curiosity = temperature, cooling, curiosity
        self._restart = restart
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
            if self.rng.random() < self._restart:
                fresh = self._fresh(taken)
                taken |= set(fresh)
                yield from fresh
                continue
            self._temperature *= self._cooling
            start = self._start()
            step = None if start is None else self._step(start, taken)
            if start is None or step is None:
                continue
            move, to = step
            self._from[to] = (start, move)
            taken.add(to)
            yield to

    def observe(self, points: Sequence[int], microseconds: Sequence[float | None]) -> None:
        """Take note of measurements, and of what the moves to them have gained."""
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
        """What a move is expected to gain, as a logarithm.

        Parameters
        ----------
        move : Move
            The kind of step.
        predicted : float
            What the model expects of this one.
        """
        total, times = self._gains.get(move, (0.0, 0))
        return (_TRUST * predicted + total) / (_TRUST + times)

    def _fresh(self, taken: set[int]) -> list[int]:
        """The best point by the estimate that is neither known nor taken."""
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
        if self.rng.random() < self._curiosity:
            return steps[int(self.rng.integers(len(steps)))]
        times = self.predict([start, *(to for _, to in steps)])
        gains = np.log(times[0] / times[1:])
        values = [self.expected(move, gain) for (move, _), gain in zip(steps, gains, strict=True)]
        return steps[int(np.argmax(values))]
