"""Operands of a workload, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Operand:
    """An input or output of a function, stored row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def zeros_behind(shape: Sequence[int], elements: int) -> int:
    """How many zeros behind each row make a tensor of so many elements one of these extents.

    Examples
    --------
    >>> zeros_behind((131, 72), 131 * 65)  # [131, 65] becomes [131, 72]
    7
    """
    *outer, inner = shape
    return inner - elements // prod(outer)
