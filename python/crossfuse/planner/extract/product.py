"""Which factors of a sum are its left operand and which its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.planner.extract.reads import (
    OUTLINE,
    Factor,
    Program,
    Read,
    distinct,
    refused,
    variables_of,
)


@dataclass(frozen=True, eq=False)
class Split:
    """The operands of a product, in the variables of its block."""

    #: Reads that the left operand is made of.
    left: tuple[Read, ...]
    #: Bytes of an element of the left operand, as stored.
    item: int
    #: The reads that have the elements of the left and of the right operand.
    main: Read
    weight: Read
    #: Reads of the sum besides.
    further: tuple[Read, ...]
    #: Coordinates that the right operand adds.
    columns: frozenset[Any]


def is_product(program: Program, block: Block) -> bool:
    """Whether a block sums products of two operands, rather than anything else.

    Each operand must follow the loops that are summed: a sum of squares has one operand, and so has
    the sum of a softmax.
    """
    if block.combine != "sum":
        return False
    mains = (_main(program, block, each) for each in program.factors(block))
    return len({each.key for each in mains if each is not None}) > 1


def products(program: Program, reads: Sequence[Read]) -> list[Read]:
    """Select the reads that are of products."""
    return [
        each
        for each in reads
        if program.is_made(each) and is_product(program, program.blocks[each.buffer])
    ]


def split(
    program: Program,
    block: Block,
    columns: frozenset[Any] | None,
    order: Sequence[Any],
) -> Split:
    """Tell the operands of a product apart; refused if it is no product of rows and a weight.

    The left operand is what comes down the chain. In the first product, the right operand has
    `columns`, the coordinates that the next product sums; if there is none (None), the left operand
    has what the output is indexed by first (`order`), of that which not both have.
    """
    factors = program.factors(block)
    mains = {id(each): _main(program, block, each) for each in factors}
    able = [each for each in factors if mains[id(each)] is not None]
    down = [each for each in factors if products(program, each.reads)]
    rights = _others(able, down)
    _check_factors(block, able)
    if not down:
        down, rights = _first_operands(program, block, able, columns, order)
    elif not rights:
        raise _refused_operand(program, block, able[-1], "two operands that are computed")
    _check_weights(program, block, _of_columns(factors, down, rights))
    first = not any(products(program, each.reads) for each in down)
    after = [] if first else _after(block, _others(factors, [*down, *rights]), down)
    made = [each for each in _others(factors, down) if any(map(program.is_made, each.reads))]
    with_left = [*down, *after, *_others(made, after)]
    left = distinct(read for each in with_left for read in each.reads)
    brought = _loops(block, block.coordinates) - variables_of(left)
    if columns is not None and not columns <= brought:
        found = "a result whose rows the next product sums"
        limit = "sums over the columns, which the weight brings in"
        raise refused(block.where, found, limit, "transpose the weight's product, or split there")
    weight = _largest(program, block, [mains[id(each)] for each in rights])
    main = _largest(
        program, block, [mains[id(each)] for each in down if mains[id(each)] is not None]
    )
    others = [read for each in _others(factors, with_left) for read in each.reads]
    besides = distinct([*(left if first else ()), *others])
    own = {weight.key, main.key}
    further = tuple(each for each in besides if each.key not in own and not program.is_made(each))
    item, mine = max(each.item for each in down), brought if columns is None else columns
    operands = Split(left, item, main, weight, further, mine)
    _check_further(block, operands)
    return operands


def _after(block: Block, factors: Sequence[Factor], down: Sequence[Factor]) -> list[Factor]:
    """Factors that may as well be part of what comes down: they follow none of the columns.

    Scales are such, and denominators of a softmax.
    """
    brought = set(block.coordinates) - {var for each in down for var in each.variables}
    return [each for each in factors if not brought & each.variables]


def _first_operands(
    program: Program,
    block: Block,
    able: list[Factor],
    columns: frozenset[Any] | None,
    order: Sequence[Any],
) -> tuple[list[Factor], list[Factor]]:
    """Tell the operands of a product of inputs apart."""
    if columns is None:
        left = _leading(program, block, able, order)
    else:
        left = [each for each in able if not columns & each.variables]
        if not left:
            found = "two operands with the columns that the next product sums"
            raise _refused_operand(program, block, able[0], found)
    rights = _others(able, left)
    if not rights:
        # The result has a single column: nothing tells the weight but its size.
        mains = [_known(program, block, each) for each in able]
        left = [able[mains.index(_largest(program, block, mains))]]
        rights = _others(able, left)
    return left, rights


def _leading(
    program: Program, block: Block, able: list[Factor], order: Sequence[Any]
) -> list[Factor]:
    """Factors with the first coordinate that others lack, which have one of their own.

    Without rows or without columns, the first parameter.
    """
    placed = [each for each in able if each.variables & set(order)]
    for coordinate in order:
        having = [each for each in placed if coordinate in each.variables]
        rest = _others(placed, having)
        own = {var for each in rest for var in each.variables} & set(order)
        if own - {var for each in having for var in each.variables}:
            return having
    first = min(able, key=lambda each: _place(program, _known(program, block, each)))
    return [first]


def _main(program: Program, block: Block, factor: Factor) -> Read | None:
    """Find the read of a factor that has its elements: it follows all that is summed."""
    summed = _loops(block, block.summed)
    able = [each for each in factor.reads if summed <= each.variables]
    down = products(program, able)
    inputs = [each for each in able if not program.is_made(each)]
    chosen = down or inputs or able
    return _largest(program, block, chosen) if chosen else None


def _known(program: Program, block: Block, factor: Factor) -> Read:
    main = _main(program, block, factor)
    assert main is not None
    return main


def _largest(program: Program, block: Block, reads: Sequence[Any]) -> Read:
    """Find the read of most elements; of equals the first parameter."""
    return max(reads, key=lambda each: (_reached(program, block, each), -_place(program, each)))


def _place(program: Program, read: Read) -> int:
    """Place among the parameters; what is made comes before them."""
    return program.inputs.get(read.buffer, -1)


def _reached(program: Program, block: Block, read: Read) -> int:
    return access.reached(read.indices, program.shape(read, block.where), block.domain)


def _loops(block: Block, variables: Sequence[Any]) -> frozenset[Any]:
    """Select variables that count further than 0: indices do not follow the others."""
    return frozenset(each for each in variables if block.domain[each] > 1)


def _others(factors: Sequence[Factor], chosen: Sequence[Factor]) -> list[Factor]:
    return [each for each in factors if not any(each is other for other in chosen)]


def _of_columns(
    factors: Sequence[Factor], down: Sequence[Factor], rights: Sequence[Factor]
) -> list[Factor]:
    """Factors of the right operand: its own, and what follows loops that only it follows."""
    brought = {var for each in rights for var in each.variables}
    brought -= {var for each in down for var in each.variables}
    more = [each for each in _others(factors, [*down, *rights]) if brought & each.variables]
    return [*rights, *more]


def _check_weights(program: Program, block: Block, rights: Sequence[Factor]) -> None:
    for each in rights:
        for read in each.reads:
            if program.is_made(read):
                raise _refused_operand(program, block, each, "a right operand that is computed")


def _check_further(block: Block, found: Split) -> None:
    """Refuse what depends on rows, columns and the sum: it is no operand of a matrix product."""
    batch = found.weight.variables
    rows = _loops(block, block.coordinates) - found.columns - batch
    for each in found.further:
        parts = (rows, found.columns, _loops(block, block.summed))
        if all(part & each.variables for part in parts):
            raise _refused_mask(block, each)


def _check_factors(block: Block, able: Sequence[Factor]) -> None:
    """Refuse a factor that has the rows of one and the columns of another."""
    followed = [each.variables & set(block.coordinates) for each in able]
    for each, own in zip(able, followed, strict=True):
        inside = [other for other in followed if other < own]
        if any(one - other and other - one for one in inside for other in inside):
            raise _refused_mask(block, each.reads[0])


def _refused_mask(block: Block, read: Read) -> Exception:
    where = f"{block.where}, buffer '{read.buffer.name}'"
    found = "a factor that follows rows, columns and the sum"
    return refused(where, found, "products of a left and a right operand")


def _refused_operand(program: Program, block: Block, factor: Factor, found: str) -> Exception:
    made = [each for each in factor.reads if program.is_made(each)]
    name = (made or factor.reads)[0].buffer.name
    where = f"{block.where}, buffer '{name}'"
    return refused(where, found, "one operand from the product before, and a weight", OUTLINE)
