"""The products of a function: their operands, and what reads their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from study.extract.reads import (
    OUTLINE,
    Factor,
    Program,
    Read,
    distinct,
    item_of_buffer,
    reached,
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
    return reached(read.indices, program.shape(read, block.where), block.domain)


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


# Products with what reads their results, from the output backwards.


@dataclass(frozen=True, eq=False)
class Reader:
    """Whatever reads the result of a product: the output, the next product, or a reduction."""

    #: Name in messages.
    where: str
    reads: tuple[Read, ...]
    #: Extents of its variables.
    domain: Mapping[Any, int]
    #: Variables that it sums, which make up the columns of the product; None for the output.
    summed: frozenset[Any] | None
    #: Bytes of an element of the result, as the reader gets it.
    item: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A product, or two that are combined."""

    blocks: tuple[Block, ...]
    #: Operands of each block, in the variables of the first; by the place of the weight among the
    #: parameters.
    splits: tuple[Split, ...]
    #: What reads the result.
    reader: Reader
    #: Coordinates of the result in the reader's variables, and the inverse.
    index: tuple[Any, ...]
    inside: Mapping[Any, Any]

    @property
    def columns(self) -> frozenset[Any]:
        """Coordinates that the weights add."""
        return self.splits[0].columns

    @property
    def rows(self) -> tuple[Any, ...]:
        """Other coordinates."""
        return tuple(each for each in self.blocks[0].coordinates if each not in self.columns)

    @property
    def domain(self) -> Mapping[Any, int]:
        """Extents of the variables of the first block."""
        return self.blocks[0].domain


def find_stages(program: Program) -> list[Stage]:
    """Find the products of a function, first to last; refused if it is no chain of them."""
    _check_uses(program)
    reader = output_reader(program)
    stages: list[Stage] = []
    while found := products(program, reader.reads):
        stages.append(_stage(program, reader, found))
        reader = next_reader(stages[-1])
    if not stages:
        raise _no_product(program, reader)
    stages.reverse()
    _check_all(program, stages)
    return stages


def _no_product(program: Program, reader: Reader) -> Exception:
    """Build the refusal of an output that no product is read for."""
    made = [program.blocks[each.buffer] for each in reader.reads if program.is_made(each)]
    found = "an output that is no element-wise function of a product"
    if made:
        found = f"the {made[0].combine} of block '{made[0].name}'"
    limit = "sums of products of a left and a right operand"
    return refused(reader.where, found, limit, "leave it to a library, there is nothing to fuse")


def output_reader(program: Program) -> Reader:
    """View the output of a function as a reader of what its block is made of."""
    block = program.blocks[program.output]
    reads: tuple[Read, ...] = program.reads(block)
    if block.combine:
        reads = (Read(block.buffer, block.coordinates),)
    return Reader(block.where, reads, block.extents, None, item_of_buffer(program.output))


def next_reader(stage: Stage) -> Reader:
    """View a stage as the reader of its left operand."""
    block, first = stage.blocks[0], stage.splits[0]
    own = {var: extent for var, extent in block.domain.items() if var not in stage.columns}
    return Reader(block.where, first.left, own, frozenset(block.summed), first.item)


def mapped(
    reader: Reader, read: Read, coordinates: Mapping[Any, int]
) -> tuple[tuple[Any, ...], Mapping[Any, Any]]:
    """Index by which a reader goes through a result, and its inverse.

    Refused if the reader does not read every element once.
    """
    inside = access.inverse(read.indices, coordinates, reader.domain)
    if inside is None:
        place = ", ".join(str(each) for each in read.indices)
        found = f"[{place}] of {list(coordinates.values())}"
        limit = "every element of the result once, in any order of rows and of columns"
        where = f"{reader.where}, buffer '{read.buffer.name}'"
        raise refused(where, found, limit, "read the whole result, as rows and columns")
    return read.indices, inside


def _stage(program: Program, reader: Reader, found: Sequence[Read]) -> Stage:
    places: dict[Any, Read] = {}
    for read in found:
        if read.buffer in places:
            where, what = f"{reader.where}, buffer '{read.buffer.name}'", "reads at two places"
            raise refused(where, what, "one element of the result for each of the reader")
        places[read.buffer] = read
    reads = list(places.values())
    blocks = [program.blocks[each.buffer] for each in reads]
    if len(blocks) > 2:
        names = ", ".join(f"'{each.name}'" for each in blocks)
        limit = "one product, or two of one left operand"
        raise refused(reader.where, f"{len(blocks)} products ({names})", limit, "join the weights")
    block, others = blocks[0], blocks[1:]
    index, inside = mapped(reader, reads[0], block.extents)
    first = split(program, block, _columns(reader, block, index), _order(reader, block, index))
    splits = [first]
    for read, other in zip(reads[1:], others, strict=True):
        theirs, _ = mapped(reader, read, other.extents)
        columns, order = _columns(reader, other, theirs), _order(reader, other, theirs)
        second = split(program, other, columns, order)
        same = access.replaced(theirs, inside, block.extents)
        values = dict(zip(other.coordinates, same, strict=True))
        splits.append(_aligned(program, block, first, other, second, values))
    splits.sort(key=lambda each: program.inputs[each.weight.buffer])
    return Stage(tuple(blocks), tuple(splits), reader, index, inside)


def _columns(reader: Reader, block: Block, index: Sequence[Any]) -> frozenset[Any] | None:
    """Coordinates that the reader sums; None if it is the output."""
    if reader.summed is None:
        return None
    columns = set()
    for coordinate, expression in zip(block.coordinates, index, strict=True):
        followed = access.variables([expression])
        if followed & reader.summed and followed - reader.summed:
            where = f"{reader.where}, buffer '{block.buffer.name}'"
            limit = "rows that stay rows, and columns that are summed"
            instead = "split the chain there, or reshape rows and columns each by themselves"
            raise refused(where, f"an index {expression} of rows and columns", limit, instead)
        if followed & reader.summed:
            columns.add(coordinate)
    return frozenset(columns)


def _order(reader: Reader, block: Block, index: Sequence[Any]) -> list[Any]:
    """Coordinates of a result in the order in which its reader goes through them."""
    pairs = list(zip(block.coordinates, index, strict=True))
    follow = {coordinate: access.variables([expression]) for coordinate, expression in pairs}
    found = [each for var in reader.domain for each in block.coordinates if var in follow[each]]
    return list(dict.fromkeys(found))


def _aligned(
    program: Program,
    block: Block,
    first: Split,
    other: Block,
    second: Split,
    values: Mapping[Any, Any],
) -> Split:
    """Express a second product's operands in the variables of the first.

    Both must have the same left operand. `values` are coordinates of the second in those of the
    first.
    """
    wanted = {each.key for each in first.left}
    for summed in _summed_alike(program, block, first, other, second):
        every = {**values, **summed}
        moved = [each.moved(every, block.domain) for each in second.left]
        left, weight = distinct(moved), second.weight.moved(every, block.domain)
        brought = access.variables(weight.indices) - variables_of(left)
        if {each.key for each in left} == wanted and brought <= first.columns:
            further = tuple(each.moved(every, block.domain) for each in second.further)
            main = second.main.moved(every, block.domain)
            return Split(left, second.item, main, weight, further, first.columns)
    found = f"products '{block.name}' and '{other.name}' of different left operands"
    raise refused(other.where, found, "two weights of one left operand")


def _summed_alike(
    program: Program, block: Block, first: Split, other: Block, second: Split
) -> Iterator[dict[Any, Any]]:
    """Candidates for the summed loops of one product in terms of those of another.

    They are what they must be for the left operands to be equal, if each of its elements belongs to
    one iteration. If not, as with windows, they may stand in any order.
    """
    names = [ir.Var(f"i{each}", "int32") for each in range(len(second.main.indices))]
    shape = program.shape(second.main, other.where)
    own = {var: extent for var, extent in other.domain.items() if var not in second.columns}
    if first.main.buffer.same_as(second.main.buffer):
        found = access.inverse(second.main.indices, dict(zip(names, shape, strict=True)), own)
        if found is not None:
            places = dict(zip(names, first.main.indices, strict=True))
            theirs = access.replaced([found[each] for each in other.summed], places, block.domain)
            yield dict(zip(other.summed, theirs, strict=True))
    for order in permutations(block.summed):
        if [block.domain[each] for each in order] == [other.domain[each] for each in other.summed]:
            yield dict(zip(other.summed, order, strict=True))


def _check_uses(program: Program) -> None:
    """Refuse an intermediate with two readers, one of which follows from the other."""
    output = program.blocks[program.output]
    steps = [each for each in program.blocks.values() if is_product(program, each)]
    users = {id(each): [] for each in (*steps, output)}  # type: dict[int, list[Block]]
    for step in (*steps, *(() if output.combine else (output,))):
        for read in {each.buffer: each for each in products(program, program.reads(step))}.values():
            users[id(program.blocks[read.buffer])].append(step)

    def later(block: Block) -> list[Block]:
        return [each for user in users[id(block)] for each in (user, *later(user))]

    for step in steps:
        for user in users[id(step)]:
            if any(each is user for other in users[id(step)] for each in later(other)):
                names = " and ".join(sorted(f"'{each.name}'" for each in users[id(step)]))
                found = f"an intermediate that blocks {names} read"
                limit = "an intermediate that one product reads"
                instead = "keep the other use out of the function, or leave it unfused"
                raise refused(f"{step.where}, buffer '{step.buffer.name}'", found, limit, instead)


def _check_all(program: Program, stages: Sequence[Stage]) -> None:
    """Refuse products beside the chain."""
    known = [block for stage in stages for block in stage.blocks]
    for block in program.blocks.values():
        if is_product(program, block) and not any(block is each for each in known):
            found = "a product beside the chain"
            raise refused(block.where, found, "products that each take what the one before made")
