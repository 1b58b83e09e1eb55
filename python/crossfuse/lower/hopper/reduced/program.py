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
    """The largest elements of each row in order, and their keys; of equal ones the lower key first.

    Attributes
    ----------
    places : Any
        The buffer of keys; `target` is that of elements, both are [row, rank].
    count : int
        How many there are.
    """

    places: Any
    count: int


@dataclass(frozen=True)
class Output:
    """What is stored.

    Attributes
    ----------
    box : Box
        Where.
    value : Any
        Expression of an element, over values of rows and best elements of its column's rank.
    """

    box: Box
    value: Any


@dataclass(frozen=True)
class RowReductions:
    """Reductions over the whole width of a tile, and what is stored of them.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs.
    row, key, column : tvm.ir.Var
        What steps are written in: row and column of the tile, column of an output.
    scores : Any
        Buffer of the product.
    tile : tuple[int, int]
        Its rows and columns.
    before, steps, after : tuple[Step, ...]
        First values of rows, what is done with the tile, and what is made of rows then: in order.
    outputs : tuple[Output, ...]
        What is stored.
    """

    places: tuple[Place, ...]
    row: Any
    key: Any
    column: Any
    scores: Any
    tile: tuple[int, int]
    before: tuple[Step, ...]
    steps: tuple[Step, ...]
    after: tuple[Step, ...]
    outputs: tuple[Output, ...]

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers of elements."""
        return (self.scores,)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """What all variables go through."""
        rows, keys = self.tile
        return (
            *((each.var, 0, each.extent) for each in self.places),
            (self.row, 0, rows),
            (self.key, 0, keys),
            (self.column, 0, max(each.box.columns for each in self.outputs)),
        )

    @property
    def best(self) -> tuple[Best, ...]:
        """Steps that keep the best elements."""
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
        """The same, of buffers with their images."""

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
