"""What becomes of the rows of a product's tile, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.stream.program import Box, Domain, Step


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


@dataclass(frozen=True)
class RowReductions:
    """Reductions over the whole width of a product's tile, and what is stored of them."""

    places: tuple[Place, ...]
    #: Variables that steps are written in: row and column of the tile, column of an output.
    row: Any
    key: Any
    column: Any
    #: Buffer of the product.
    scores: Any
    #: Rows and columns.
    tile: tuple[int, int]
    #: In order: first values of rows, then `steps` over the tile, then `after`, made of both.
    before: tuple[Step, ...]
    steps: tuple[Step, ...]
    after: tuple[Step, ...]
    outputs: tuple[Output, ...]

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers with an element for each row and column of the tile."""
        return (self.scores,)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Every variable with its range: first value and extent."""
        rows, keys = self.tile
        return (
            *((each.var, 0, each.extent) for each in self.places),
            (self.row, 0, rows),
            (self.key, 0, keys),
            (self.column, 0, max(each.box.columns for each in self.outputs)),
        )

    @property
    def best(self) -> tuple[Best, ...]:
        """Steps that find the best elements."""
        return tuple(each for each in self.steps if isinstance(each, Best))

    @property
    def rows(self) -> tuple[Any, ...]:
        """Buffers of values of rows, each once."""
        all_steps = (*self.before, *self.steps, *self.after)
        return tuple(dict.fromkeys(e.target for e in all_steps if not isinstance(e, Best)))

    def mapped(self, change: Callable[[Any], Any]) -> RowReductions:
        """The same with the expressions of all steps changed, but for those of outputs."""
        changed = {
            name: tuple(replace(each, value=change(each.value)) for each in getattr(self, name))
            for name in ("before", "steps", "after")
        }
        return replace(self, **changed)

    def with_parameters(self, images: Mapping[Any, Any]) -> RowReductions:
        """The same with buffers replaced by their images."""

        def change(value: Any) -> Any:
            return ir.substitute(value, lambda var: images.get(var, var))

        outputs = tuple(
            Output(
                replace(each.box, buffer=images.get(each.box.buffer, each.box.buffer)),
                change(each.value),
            )
            for each in self.outputs
        )
        return replace(self.mapped(change), outputs=outputs)
