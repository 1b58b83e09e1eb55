"""Reductions that are no products, with the tensors of the chain that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.planner.chain.layers import PARTS, Reduced
from crossfuse.planner.extract.parts import Parts
from crossfuse.planner.extract.product import is_product, products
from crossfuse.planner.extract.reads import Program, Read
from crossfuse.planner.extract.refusal import refused
from crossfuse.planner.extract.stages import Reader, mapped


@dataclass(frozen=True, eq=False)
class FoundReduction:
    """A reduction, and the inputs that it reads besides, in the variables of the product."""

    reduced: Reduced
    besides: tuple[Read, ...]


def find_reductions(
    program: Program, parts: Sequence[Parts]
) -> tuple[list[FoundReduction], list[list[FoundReduction]]]:
    """Find all reductions of a function that are no products.

    Parameters
    ----------
    program : Program
        The function.
    parts : Sequence[Parts]
        Its products, first to last.

    Returns
    -------
    tuple[list, list[list]]
        Those of the first left operand, and those of each product's result; in program order.

    Raises
    ------
    PlanRefused
        If one reduces something else.
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
    coordinates = part.stage.blocks[0].coordinates
    extents = {each: part.stage.domain[each] for each in coordinates}
    found = [each for each in reads if each.buffer in made]
    index, inside = mapped(reader, found[0], extents)
    summed = [
        coordinate
        for coordinate, expression in zip(coordinates, index, strict=True)
        if access.variables([expression]) & set(block.summed)
    ]
    inputs = [each for each in reads if not program.is_made(each)]
    besides = tuple(each.moved(inside, extents) for each in inputs)
    return FoundReduction(Reduced(block.name, block.combine, part.of(summed)), besides)


def _of_input(program: Program, block: Block, part: Parts) -> FoundReduction:
    """A reduction of the first left operand, such as the mean of its squares."""
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
