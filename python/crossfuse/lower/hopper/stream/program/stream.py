"""What a stream of tiles computes, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Place
from crossfuse.lower.hopper.stream.program.parts import Box, Domain, Split, Step, Stream


@dataclass(frozen=True)
class StreamProgram:
    """A kernel: for each place, a stream of tiles between two products.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs, outermost first.
    parameters : tuple
        Parameters of the function.
    stream : Stream
        The loop over tiles.
    row, key, column : tvm.ir.Var
        What steps are written in: the row and the key in their tiles, the column of the output.
    queries, keys, values, output : Box
        What is loaded, and where results go. `queries` are loaded once. `values` may be `keys`: one
        tile, of which the second product takes as many columns as the output has.
    scores : Any
        Buffer of the first product, rows by keys.
    weights : Step
        What becomes of the scores: the left operand of the second product.
    sums : Any
        Buffer of the second product, rows by columns.
    before : tuple[Step, ...]
        State of rows as the stream finds it.
    steps : tuple[Step, ...]
        What is done to each tile of scores, in order.
    carries : tuple[Step, ...]
        What is done to the sums before a tile is added, in order.
    after : tuple[Step, ...]
        What is made of the state of rows behind the stream, or of the merged one.
    result : Any
        Expression of an element of the output.
    split : Split | None
        How CTAs share the keys; `column` is then that of a CTA's slice in `after` and
        `result`.
    """

    places: tuple[Place, ...]
    parameters: tuple[Any, ...]
    stream: Stream
    row: Any
    key: Any
    column: Any
    queries: Box
    keys: Box
    values: Box
    output: Box
    scores: Any
    weights: Step
    sums: Any
    before: tuple[Step, ...]
    steps: tuple[Step, ...]
    carries: tuple[Step, ...]
    after: tuple[Step, ...]
    result: Any
    split: Split | None = None

    @property
    def shares_tile(self) -> bool:
        """Whether keys and values are one tile in shared memory."""
        return self.values is self.keys

    @property
    def beside(self) -> Place | None:
        """Which CTA of a cluster it is that goes through the same tiles; None if it is alone."""
        if self.split is not None:
            return None
        return next((each for each in self.places if each.in_cluster), None)

    @property
    def tile_places(self) -> tuple[Place, ...]:
        """Places that tell tiles of rows apart, whichever CTA shares their keys."""
        own = None if self.split is None else self.split.place
        return tuple(each for each in self.places if each is not own)

    @property
    def elements(self) -> tuple[Any, ...]:
        """Buffers of elements: those of both products."""
        return self.sums, self.scores

    @property
    def domains(self) -> tuple[Domain, ...]:
        """What all variables go through."""
        rows, keys = self.tile
        first, end = self.stream.bounds
        return (
            *((each.var, 0, each.extent) for each in self.places),
            (self.stream.var, first, end - first),
            (self.row, 0, rows),
            (self.key, 0, keys),
            (self.column, 0, self.output.columns),
        )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and keys of a tile of scores."""
        return self.queries.rows, self.keys.rows

    @property
    def dtype(self) -> str:
        """Element type of all operands."""
        return self.queries.dtype

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """Everything that is done to a tile of scores."""
        return (*self.steps, self.weights)

    def mapped(self, change: Callable[[Any], Any]) -> StreamProgram:
        """The same with every expression of steps and of the result changed."""

        def step(each: Step) -> Step:
            return replace(each, value=change(each.value))

        def steps(group: tuple[Step, ...]) -> tuple[Step, ...]:
            return tuple(map(step, group))

        split = self.split
        if split is not None:
            split = replace(
                split,
                slabs=steps(split.slabs),
                before=steps(split.before),
                steps=steps(split.steps),
            )
        return replace(
            self,
            before=steps(self.before),
            steps=steps(self.steps),
            weights=step(self.weights),
            carries=steps(self.carries),
            after=steps(self.after),
            result=change(self.result),
            split=split,
        )

    def on(self, images: Mapping[Any, Any]) -> StreamProgram:
        """The same on a kernel's parameters, by those of the function."""
        return self.mapped(lambda value: ir.substitute(value, lambda var: images.get(var, var)))

    def with_steps(self, steps: tuple[Step, ...], weights: Step) -> StreamProgram:
        """The same with other steps that come to the same."""
        return replace(self, steps=steps, weights=weights)
