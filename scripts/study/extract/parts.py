"""Roles of the loops of a product in the chain: rows, a batch, columns, or its sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block, read_flow, shape_of
from crossfuse.planner.chain.build import PARTS, Further, Reduced
from study.extract.product import Reader, Stage, is_product, mapped, products
from study.extract.reads import Program, Read, distinct, item_of_buffer, reached, refused

# A function as blocks that read each other, with its inputs and its one output.


def read_program(func: Any) -> Program:
    """Read an unscheduled function as its blocks, by what they write.

    Refused are buffers that several blocks write or that are read before they are written, results
    that nothing reads, and any number of outputs but one.
    """
    if not isinstance(func, ir.PrimFunc):
        found = f"a {type(func).__name__}"
        raise refused("function", found, "a PrimFunc in s_tir form", "pass one function of it")
    flow = read_flow(func)
    outputs, blocks = flow.outputs, dict(flow.made)
    buffers = [each for each in func.params if ir.is_buffer_var(each)]
    inputs = {each: place for place, each in enumerate(buffers) if each in flow.inputs}
    if len(outputs) != 1:
        names = ", ".join(f"'{each.name}'" for each in outputs)
        found = f"{len(outputs)} outputs" + (f" ({names})" if names else "")
        raise refused("function", found, "one output", "split the function, one for each output")
    _check_used(blocks, outputs[0])
    program = Program(blocks, inputs, outputs[0])
    program.take_apart()
    return program


def _check_used(blocks: dict[Any, Block], output: Any) -> None:
    used = {source for each in blocks.values() for source in each.sources}
    if output in used:
        found = "an output that is read again"
        instead = "copy it to a buffer of its own"
        raise refused(f"buffer '{output.name}'", found, "an output that is only written", instead)
    idle = [
        block
        for buffer, block in blocks.items()
        if buffer not in used and not buffer.same_as(output)
    ]
    if idle:
        found = "a result that nothing reads"
        raise refused(idle[0].where, found, "blocks that the output needs", "take the block out")


# Which rows of a chain are matrices of a batch: those that have weights of their own.
#
# Rows that all weights are shared by make one matrix, however many loops they are. A product whose
# weights are shared has rows of both kinds if one before or after it has a batch.

RowParts = dict[Any, frozenset[str]]


def batch_of(stage: Stage) -> frozenset[Any]:
    """Rows that the weights of a product follow."""
    followed = [each.weight.variables for each in stage.splits]
    return frozenset(stage.rows).intersection(*followed)


def row_parts(stages: Sequence[Stage]) -> list[RowParts]:
    """Find which rows of each product are ``"row"``, ``"batch"``, or both, by coordinate.

    `stages` are all products, first to last. A coordinate that is always 0 is neither. Weights of
    two products for different matrices are refused.
    """
    batched = [index for index, each in enumerate(stages) if batch_of(each)]
    if not batched:
        return [dict.fromkeys(each.rows, frozenset({"row"})) for each in stages]
    first = batched[0]
    found: list[RowParts] = [{} for _ in stages]
    found[first] = _own(stages[first])
    for index in range(first, len(stages) - 1):
        later = stages[index + 1]
        seen = _forward(stages[index], found[index], later)
        if index + 1 in batched:
            _check_same(stages[first], later, seen)
            seen = _own(later)
        found[index + 1] = seen
    for index in reversed(range(first)):
        found[index] = _backward(stages[index], found[index + 1])
    return found


def _own(stage: Stage) -> RowParts:
    batch = batch_of(stage)
    return {each: frozenset({"batch" if each in batch else "row"}) for each in stage.rows}


def _forward(stage: Stage, parts: RowParts, later: Stage) -> RowParts:
    found: RowParts = dict.fromkeys(later.rows, frozenset())
    for coordinate, index in zip(stage.blocks[0].coordinates, stage.index, strict=True):
        for var in access.variables([index]):
            if var in found:
                found[var] |= parts.get(coordinate, frozenset())
    return found


def _backward(stage: Stage, parts: Mapping[Any, frozenset[str]]) -> RowParts:
    pairs = dict(zip(stage.blocks[0].coordinates, stage.index, strict=True))
    return {
        row: frozenset[str]().union(
            *(parts.get(var, frozenset()) for var in access.variables([pairs[row]]))
        )
        for row in stage.rows
    }


def _check_same(first: Stage, later: Stage, seen: RowParts) -> None:
    own = _own(later)
    odd = [row for row, parts in seen.items() if parts and parts != own[row]]
    if odd:
        block, weight = later.blocks[0], later.splits[0].weight.buffer.name
        found = f"a weight '{weight}' for other matrices than that of {first.blocks[0].where}"
        instead = "split the chain between the two products"
        raise refused(block.where, found, "one batch for all weights", instead)


class Parts:
    """A product with the role that each of its variables has in the chain.

    `rows` are those of `row_parts`, `batch` the matrices of the chain's batch; 0 for none.
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
        """Bytes of an input's element, and how often each is repeated along `followed` parts."""
        elements = prod(self.sizes[each] for each in followed)
        shape = shape_of(read.buffer, self.stage.blocks[0].where)
        within = reached(read.indices, shape, self.stage.domain)
        return item_of_buffer(read.buffer), max(elements // within, 1)

    def further(self, program: Program, besides: Sequence[Read]) -> list[Further]:
        """Inputs of the product besides its operands, in the order of the parameters."""
        stage = self.stage
        after = [each for each in stage.reader.reads if not program.is_made(each)]
        moved = [each.moved(stage.inside, stage.blocks[0].extents) for each in after]
        with_operands = [each for split in stage.splits for each in split.further]
        found = distinct([*with_operands, *moved, *besides])
        inputs = [each for each in found if not program.is_made(each)]
        inputs.sort(key=lambda each: program.inputs[each.buffer])
        return [self._as_further(each) for each in inputs]

    def _as_further(self, read: Read) -> Further:
        parts = self.of(read.variables)
        return Further(parts, *self.operand(read, parts))


# Reductions that are no products, and the tensors of the chain that they read.


@dataclass(frozen=True, eq=False)
class FoundReduction:
    """A reduction, and the inputs that it reads besides, in the variables of the product."""

    reduced: Reduced
    besides: tuple[Read, ...]


def find_reductions(
    program: Program, parts: Sequence[Parts]
) -> tuple[list[FoundReduction], list[list[FoundReduction]]]:
    """Find all reductions of a function that are no products, in program order.

    Those of the first left operand come first, then those of each product's result. Reductions of
    anything else are refused.
    """
    at_first: list[FoundReduction] = []
    at_stages: list[list[FoundReduction]] = [[] for _ in parts]
    for block in program.blocks.values():
        if not block.combine or is_product(program, block):
            continue
        made = {each.buffer for each in products(program, program.reads(block))}
        if not made:
            at_first.append(_of_input(program, block, parts[0]))
            continue
        places = [
            index
            for index, each in enumerate(parts)
            if made <= {block.buffer for block in each.stage.blocks}
        ]
        if not places:
            names = " and ".join(sorted(f"'{each.name}'" for each in made))
            limit = "reductions of what one product makes"
            raise refused(block.where, f"a {block.combine} of {names}", limit)
        at_stages[places[0]].append(_of_product(program, block, parts[places[0]], made))
    return at_first, at_stages


def _of_product(program: Program, block: Block, part: Parts, made: set[Any]) -> FoundReduction:
    reads = program.reads(block)
    reader = Reader(block.where, reads, block.domain, None, 1)
    extents = part.stage.blocks[0].extents
    found = [each for each in reads if each.buffer in made]
    index, inside = mapped(reader, found[0], extents)
    summed = [
        coordinate
        for coordinate, expression in zip(extents, index, strict=True)
        if access.variables([expression]) & set(block.summed)
    ]
    inputs = [each for each in reads if not program.is_made(each)]
    besides = tuple(each.moved(inside, extents) for each in inputs)
    return FoundReduction(Reduced(block.name, block.combine, part.of(summed)), besides)


def _of_input(program: Program, block: Block, part: Parts) -> FoundReduction:
    """Read a reduction of the first left operand, such as the mean of its squares."""
    split = part.stage.splits[0]
    reads = program.reads(block)
    same = [each for each in reads if each.buffer.same_as(split.main.buffer)]
    known = {each.buffer for each in split.left}
    if not same or any(each.buffer not in known for each in reads):
        names = ", ".join(f"'{each.buffer.name}'" for each in reads) or "nothing"
        limit = f"reductions of products, or of the left operand '{split.main.buffer.name}'"
        raise refused(block.where, f"a {block.combine} of {names}", limit)
    found: set[str] = set()
    for ours, theirs in zip(split.main.indices, same[0].indices, strict=True):
        if access.variables([theirs]) & set(block.summed):
            found |= set(part.of(access.variables([ours])))
    parts = tuple(each for each in PARTS if each in found)
    return FoundReduction(Reduced(block.name, block.combine, parts), ())
