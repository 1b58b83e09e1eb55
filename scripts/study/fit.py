"""Fits what no microbenchmark gives to the times of measured kernels.

Least squares on the logarithm of the time, so that a microsecond of a short kernel counts as much
as its share of a long one. Constants are fitted as logarithms too, which keeps them positive, and
drawn to where they began: data that say nothing about one leave it there. Errors of more than 10 %
count as their absolute value, so that a few kernels which the model does not understand do not bend
what it says of all others. scipy does the descent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import eager, estimate
from crossfuse.planner.cost.rates import Fitted, Rates
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import read_kernel
from crossfuse.planner.kernels.shape import Shape, stack

_NAMES = tuple(each.name for each in fields(Fitted))


@dataclass(frozen=True)
class Sample:
    """A kernel that was measured.

    Attributes
    ----------
    spec : str
        Text of the workload.
    shape : Shape
        Its extents.
    family : str
        One of `crossfuse.planner.families.FAMILIES`, or `EAGER`.
    tiles : Mapping[str, Any]
        Its tiles, see `read_kernel`.
    microseconds : float
        Its time.
    """

    spec: str
    shape: Shape
    family: str
    tiles: Mapping[str, Any]
    microseconds: float


@dataclass(frozen=True)
class Fit:
    """What came of a fit.

    Attributes
    ----------
    rates : Rates
        With what was fitted.
    errors : numpy.ndarray
        Logarithm of estimated over measured time, of each sample.
    """

    rates: Rates
    errors: np.ndarray

    @property
    def spread(self) -> float:
        """Root of the mean square error: 0.1 is 10 %."""
        return float(np.sqrt(np.mean(self.errors**2)))


def predict(samples: Sequence[Sample], device: Device) -> Callable[[Rates], np.ndarray]:
    """Prepare the estimate of all samples: a function of the constants alone."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, each in enumerate(samples):
        shape = each.shape
        key = (each.family, shape.products, shape.item, shape.out, shape.k_major)
        groups.setdefault(key, []).append(index)
    stacks: list[tuple[list[int], Any, Shape, Any]] = []
    for (family, *_), indices in groups.items():
        shapes = _together([samples[each].shape for each in indices])
        if family == EAGER:
            stacks.append((indices, None, shapes, None))
            continue
        kernels = stack([read_kernel(family, samples[each].tiles) for each in indices])
        stacks.append((indices, kernels, shapes, kernels.memories(shapes, device)[-1]))

    def times(rates: Rates) -> np.ndarray:
        found = np.zeros(len(samples))
        for indices, kernels, shapes, room in stacks:
            if kernels is None:
                found[indices] = eager(shapes, rates).microseconds
            else:
                found[indices] = estimate(kernels, shapes, device, rates, room).microseconds
        return found

    return times


def _together(shapes: Sequence[Shape]) -> Shape:
    """Shapes that differ in their extents and further bytes alone, as one of arrays."""
    extents: Any = {
        each: np.array([getattr(shape, each) for shape in shapes], np.float64)
        for each in (*"mnkl", "further")
    }
    return replace(shapes[0], **extents)


def fit(
    samples: Sequence[Sample],
    rates: Rates,
    device: Device,
    *,
    held: Sequence[str] = (),
    pull: float = 0.7,
    rounds: int = 60,
) -> Fit:
    """Fit the constants of `Fitted`.

    Parameters
    ----------
    samples : Sequence[Sample]
        What was measured.
    rates : Rates
        Where constants begin.
    device : Device
        Of the samples.
    held : Sequence[str]
        Constants that stay.
    pull : float
        Standard deviation of a constant's logarithm around where it began, in units of the spread
        of one sample; larger ones follow the data more.
    rounds : int
        Evaluations of the model at most, without those for derivatives.
    """
    from scipy.optimize import least_squares

    times = predict(samples, device)
    measured = np.log([each.microseconds for each in samples])
    names = [each for each in _NAMES if each not in held]
    start = np.log([getattr(rates.fitted, each) for each in names])
    scale = _SPREAD / pull

    def rates_at(point: np.ndarray) -> Rates:
        changed = {name: float(np.exp(value)) for name, value in zip(names, point, strict=True)}
        return replace(rates, fitted=replace(rates.fitted, **changed))

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = np.log(times(rates_at(point))) - measured
        return np.concatenate([errors, scale * (point - start)])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=_SPREAD, max_nfev=rounds)
    best = rates_at(found.x)
    return Fit(best, np.log(times(best)) - measured)


#: Error of a sample that is expected.
_SPREAD = 0.1


def report(samples: Sequence[Sample], errors: np.ndarray) -> dict[str, Any]:
    """How well estimates rank what was measured, chain by chain.

    Parameters
    ----------
    samples : Sequence[Sample]
        What was measured.
    errors : numpy.ndarray
        See `Fit`.

    Returns
    -------
    dict
        Per family the spread of errors; per chain the number of kernels, Spearman's rank
        correlation, and by how much the estimate's first choice, and the best of its first three
        and eight, are slower than the fastest that was measured.
    """
    families: dict[str, list[float]] = {}
    chains: dict[str, list[int]] = {}
    for index, each in enumerate(samples):
        families.setdefault(each.family, []).append(float(errors[index]))
        if each.family != EAGER:
            chains.setdefault(each.spec, []).append(index)
    times = np.array([each.microseconds for each in samples])
    guesses = times * np.exp(errors)
    return {
        "families": {
            name: {
                "kernels": len(found),
                "bias": round(float(np.mean(found)), 3),
                "spread": round(float(np.sqrt(np.mean(np.square(found)))), 3),
            }
            for name, found in families.items()
        },
        "chains": {
            name: _ranking(times[found], guesses[found])
            for name, found in chains.items()
            if len(found) > 1
        },
    }


def _ranking(times: np.ndarray, guesses: np.ndarray) -> dict[str, float]:
    order = np.argsort(guesses)
    least = float(times.min())
    regret = {
        f"top{count}": round(float(times[order[:count]].min()) / least - 1, 4)
        for count in (1, 3, 8)
    }
    return {"kernels": len(times), "rank": round(rank_correlation(times, guesses), 3), **regret}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: correlation of the ranks, ties by the order in which they come."""
    ranks = [np.argsort(np.argsort(each)).astype(np.float64) for each in (a, b)]
    x, y = (each - each.mean() for each in ranks)
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))
