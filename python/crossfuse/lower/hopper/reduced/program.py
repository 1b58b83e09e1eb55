"""What becomes of the rows of a product's tile, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.stream.program import Box, RowSteps, Step


@dataclass(frozen=True, kw_only=True)
class Best(Step):
    """The largest elements of each row in order, and their keys; of equal ones the lower first."""

    #: The buffer of keys; `target` is that of elements, both are [row, rank].
    places: Any
    #: Number of ranks.
    count: int


@dataclass(frozen=True)
class Output:
    """What is stored of each row."""

    box: Box
    #: Expression of an element, over values of rows and the best element of its column's rank.
    value: Any


@dataclass(frozen=True, kw_only=True)
class RowReductions(RowSteps):
    """Reductions over the whole width of a product's tile, and what is stored of them."""

    #: Rows and columns.
    size: tuple[int, int]
    outputs: tuple[Output, ...]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return self.size

    @property
    def columns(self) -> int:
        """Most columns of an output."""
        return max(each.box.columns for each in self.outputs)

    @property
    def best(self) -> tuple[Best, ...]:
        """Steps that find the best elements."""
        return tuple(each for each in self.steps if isinstance(each, Best))

    @property
    def rows(self) -> tuple[Any, ...]:
        """Buffers of values of rows, each once."""
        all_steps = (*self.before, *self.steps, *self.after)
        return tuple(dict.fromkeys(e.target for e in all_steps if not isinstance(e, Best)))

    def with_parameters(self, images: Mapping[Any, Any]) -> RowReductions:
        """The same on other buffers than the function's parameters, outputs too."""
        outputs = tuple(
            Output(
                replace(each.box, buffer=images.get(each.box.buffer, each.box.buffer)),
                ir.substitute(each.value, images),
            )
            for each in self.outputs
        )
        return replace(super().with_parameters(images), outputs=outputs)
