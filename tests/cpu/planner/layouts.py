"""Matrices stored in any shape: rows and columns split into loops, joined, and permuted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Dimensions of a buffer, each a run of consecutive factors of some axis.

    An axis is a tuple of factors, outermost first; an element of it is a number in their mixed
    radix. Dimensions are (axis, first factor, last factor) in the order of the buffer.
    """

    axes: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[int, int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(self.axes[axis][first:last]) for axis, first, last in self.dims)

    def position(self, indices: Sequence[Any], axis: int) -> Any:
        """The element of an axis at the indices of a buffer."""
        found: Any = 0
        for index, (own, _, last) in zip(indices, self.dims, strict=True):
            if own == axis:
                found = found + index * prod(self.axes[axis][last:])
        return found

    def indices(self, positions: Sequence[Any]) -> list[Any]:
        """Indices of the buffer for an element of each axis."""
        found = []
        for (axis, first, last), extent in zip(self.dims, self.shape, strict=True):
            inner, outer = prod(self.axes[axis][last:]), prod(self.axes[axis][:first])
            index = positions[axis] // inner if inner > 1 else positions[axis]
            found.append(index % extent if outer > 1 else index)
        return found


def random_layout(
    rng: np.random.Generator, axes: Sequence[tuple[int, ...]], *, permuted: bool = True
) -> Layout:
    """Cut each axis anywhere and put the pieces in any order."""
    dims: list[tuple[int, int, int]] = []
    for axis, factors in enumerate(axes):
        cuts = [each for each in range(1, len(factors)) if rng.random() < 0.5]
        ends = [0, *cuts, len(factors)]
        dims += [(axis, *each) for each in pairwise(ends)]
    order = rng.permutation(len(dims)) if permuted else range(len(dims))
    return Layout(tuple(axes), tuple(dims[each] for each in order))
