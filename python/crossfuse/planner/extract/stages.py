"""The products of a function, each with what reads its result, from the output backwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.planner.extract.product import Split, is_product, products, split
from crossfuse.planner.extract.reads import (
    Program,
    Read,
    distinct,
    item_of_buffer,
    refused,
    variables_of,
)


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
