"""A search from the first proposal to the last measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.tune.space import Space
from crossfuse.planner.tune.strategy import (
    Annealing,
    Evolution,
    Model,
    ModelOnly,
    RandomSearch,
    Strategy,
)

#: Measures points: microseconds, None of what does not work.
Measure: TypeAlias = Callable[[Sequence[int]], Sequence[float | None]]

STRATEGIES: dict[str, type[Strategy]] = {
    "evolution": Evolution,
    "annealing": Annealing,
    "random": RandomSearch,
    "model": ModelOnly,
}


def make_strategy(name: str, space: Space, model: Model | None = None, seed: int = 0) -> Strategy:
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


def drive(
    strategy: Strategy,
    measure: Measure,
    trials: int,
    *,
    batch: int = 8,
    stop: Callable[[], bool] = lambda: False,
) -> int | None:
    """Measure what a search proposes, and let it and its model learn.

    `trials` points are measured, `batch` between two proposals; before each batch, `stop` is asked
    whether to leave the rest. The result is the fastest point; None where nothing works.
    """
    left = trials
    while left > 0 and not stop():
        points = strategy.propose(min(batch, left))
        if not points:
            break
        times = measure(points)
        strategy.observe(points, list(times))
        strategy.model.update(strategy.space, points, times)
        left -= len(points)
    return strategy.best
