"""What the loops of a product are to the chain: rows, a batch, columns, or its sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from crossfuse.blocks import access
from crossfuse.blocks.placement import shape_of
from crossfuse.planner.chain.layers import PARTS, Further
from crossfuse.planner.extract.batch import Parts as RowParts
from crossfuse.planner.extract.batch import batch_of
from crossfuse.planner.extract.reads import Program, Read, distinct, item_of_buffer
from crossfuse.planner.extract.stages import Stage


class Parts:
    """A product with the part that each of its variables has in the chain.

    Parameters
    ----------
    stage : Stage
        The product.
    rows : dict
        Parts of its rows, see `row_parts`.
    batch : int
        Matrices of the chain's batch; 0 for none.
    """

    def __init__(self, stage: Stage, rows: RowParts, batch: int) -> None:
        self.stage = stage
        self.batch = batch
        self.batch_variables = batch_of(stage)
        self._rows = rows

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Extent of each part."""
        stage, domain = self.stage, self.stage.domain
        rows = access.extent_of(stage.rows, domain)
        return {
            "batch": max(self.batch, 1),
            "row": rows // max(self.batch, 1),
            "column": access.extent_of(stage.columns, domain),
            "summed": access.extent_of(stage.blocks[0].summed, domain),
        }

    def of(self, variables: Iterable[Any]) -> tuple[str, ...]:
        """Parts that variables of the product have, in the order of `PARTS`."""
        found: set[str] = set()
        for var in variables:
            if var in self.stage.columns:
                found.add("column")
            elif var in self._rows:
                found |= self._rows[var]
            elif self.stage.domain[var] > 1:
                found.add("summed")
        return tuple(each for each in PARTS if each in found)

    def operand(self, read: Read, followed: Sequence[str]) -> tuple[int, int]:
        """Bytes of an element of an input, and how often each stands in what parts go through."""
        elements = prod(self.sizes[each] for each in followed)
        shape = shape_of(read.buffer, self.stage.blocks[0].where)
        reached = access.reached(read.indices, shape, self.stage.domain)
        return item_of_buffer(read.buffer), max(elements // reached, 1)

    def further(self, program: Program, besides: Sequence[Read]) -> list[Further]:
        """What the product reads besides its operands, in the order of the parameters."""
        stage = self.stage
        after = [each for each in stage.reader.reads if not program.is_made(each)]
        moved = [each.moved(stage.inside, self._coordinates) for each in after]
        with_operands = [each for split in stage.splits for each in split.further]
        found = distinct([*with_operands, *moved, *besides])
        inputs = [each for each in found if not program.is_made(each)]
        inputs.sort(key=lambda each: program.inputs[each.buffer])
        return [self._as_further(each) for each in inputs]

    @property
    def _coordinates(self) -> Mapping[Any, int]:
        return {each: self.stage.domain[each] for each in self.stage.blocks[0].coordinates}

    def _as_further(self, read: Read) -> Further:
        parts = self.of(read.variables)
        return Further(parts, *self.operand(read, parts))
