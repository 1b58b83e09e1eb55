"""Finds sums of columns beside a cascade of rows, and cuts such functions in two.

The gradient of a norm's gain is a sum over the rows, of what each of them makes once its own sums
are known. A stream that keeps the columns of its threads adds as it goes from row to row. So what
is summed becomes an output of the rows, which is kept and not stored, and what is left adds the
sums of CTAs: a second cascade, whose rows are columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_blocks
from crossfuse.blocks.write import write_function
from crossfuse.errors import PlanRefused


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """A function in two, cut where rows are added up."""

    #: The whole.
    function: Any
    #: A cascade of rows; its last outputs are what is summed, in the order of `sums`.
    rows: Any
    #: The sums, over the rows.
    sums: tuple[Block, ...]
    #: What is made of them.
    after: tuple[Block, ...]

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the outputs of `rows` that are summed."""
        return tuple(map(_term, self.sums))

    def partial(self, groups: int) -> tuple[Any, ...]:
        """Buffers of the sums of groups of rows, in the order of `sums`."""
        return tuple(_partial(each, groups) for each in self.sums)

    def added(self, groups: int) -> tuple[Any, ...]:
        """Functions that add the sums of groups, one of each sum; these are their last input."""
        return tuple(self._added(each, groups) for each in self.sums)

    def _added(self, block: Block, groups: int) -> Any:
        buffer, first = _over_groups(block, groups)
        blocks = [first, *_after(self.after, [block])]
        read = _read(blocks)
        given = [each for each in self.function.params if each in read]
        results = _of(self.function.params, blocks)
        return write_function([*given, buffer], blocks, results, _index_type(blocks))


def column_sums(func: Any) -> ColumnSums | None:
    """Cut a function where rows are added up, or return None.

    The function is unscheduled, with one block for each operator. None if it is not of such blocks,
    or if no sum is over the leading dimensions of a tensor whose rows another reduction takes in,
    and waits for what these make of a row: sums of both kinds side by side are two cascades.
    """
    try:
        blocks = read_blocks(func)
    except PlanRefused:
        return None
    sums = _sums(blocks)
    if not sums or len(set(map(_shape, sums))) > 1:
        return None
    made = set(_buffers(each for each in blocks if each not in sums))
    if not made & _read(sums):
        return None
    after = _after(blocks, sums)
    first = [_as_terms(each) if each in sums else each for each in blocks if each not in after]
    # What is made of sums is no row's, and no row waits for them.
    if not any(each.combine for each in first) or any(each.combine for each in after):
        return None
    # Each sum is added by a function of its own.
    if sum(len(_after(after, [each])) for each in sums) > len(after):
        return None
    terms = [each.buffer for each in first if str(each.buffer.name) in set(map(_term, sums))]
    read = _read(first)
    given = [each for each in func.params if each in read and each not in _buffers(blocks)]
    results = [*_of(func.params, first), *terms]
    rows = write_function(given, first, results, _index_type(blocks))
    return ColumnSums(func, rows, sums, after)


def _sums(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Sums of columns of what the rows' reductions read, and of what is read beside it."""
    columns = {block: of for block in blocks if (of := _by_column(block))}
    known = _read(each for each in blocks if each.combine and each not in columns)
    # Any product of a row and a matrix is a sum of columns, but of a tensor of its own.
    found: set[Block] = set()
    while more := {each for each in columns if columns[each] & known} - found:
        found |= more
        known |= set().union(*(columns[each] for each in more))
    return tuple(each for each in blocks if each in found)


def _by_column(block: Block) -> set[Any]:
    """Tensors whose columns a block adds up; none if it does anything else."""
    if block.combine != "sum" or len(block.coordinates) != 1:
        return set()
    own = (*block.summed, *block.coordinates)
    return {each.source for each in ir.buffer_loads(block.value) if _are(each.indices, own)}


def _are(indices: Iterable[Any], variables: Sequence[Any]) -> bool:
    found = list(indices)
    return len(found) == len(variables) and all(
        one.same_as(other) for one, other in zip(found, variables, strict=True)
    )


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(block.domain[each] for each in (*block.summed, *block.coordinates))


def _term(block: Block) -> str:
    return f"{block.buffer.name}_terms"


def _as_terms(block: Block) -> Block:
    """A sum's block as one that stores what is summed."""
    own = (*block.summed, *block.coordinates)
    buffer = ir.tirx.decl_buffer(_shape(block), str(block.buffer.ty.dtype), _term(block))
    return replace(
        block,
        name=_term(block),
        buffer=buffer,
        coordinates=own,
        summed=(),
        combine="",
        initial=None,
    )


def _partial(block: Block, groups: int) -> Any:
    shape = [groups, *(block.domain[each] for each in block.coordinates)]
    name = f"{block.buffer.name}_partial"
    return ir.tirx.decl_buffer(shape, str(block.buffer.ty.dtype), name)


def _over_groups(block: Block, groups: int) -> tuple[Any, Block]:
    """A sum's block over sums of groups, with the buffer of these."""
    buffer = _partial(block, groups)
    group = ir.Var("group", str(block.summed[0].ty))
    domain = {**block.extents, group: groups}
    value = ir.tirx.BufferLoad(buffer, [group, *block.coordinates])
    return buffer, replace(block, summed=(group,), domain=domain, value=value)


def _after(blocks: Sequence[Block], sums: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks that read sums, or what is made of them."""
    made = set(_buffers(sums))
    found = []
    for block in blocks:
        if made & _read([block]):
            made.add(block.buffer)
            found.append(block)
    return tuple(found)


def _buffers(blocks: Iterable[Block]) -> list[Any]:
    return [each.buffer for each in blocks]


def _read(blocks: Iterable[Block]) -> set[Any]:
    return {load.source for each in blocks for load in ir.buffer_loads(each.value)}


def _of(parameters: Iterable[Any], blocks: Sequence[Block]) -> list[Any]:
    """Parameters that blocks write, in the order of these."""
    made = _buffers(blocks)
    return [each for each in parameters if each in made]


def _index_type(blocks: Sequence[Block]) -> str:
    return str(blocks[0].coordinates[0].ty)
