"""Recognises a top-k that is written as plain reductions, by the rank of each element.

The known form, here of the values ``x[i, j]``; `crossfuse.workload.cascade_build.top_of` has it::

    rank[i, j]   = sum over l of  1 where x[i, l] > x[i, j] or (x[i, l] == x[i, j] and l < j) else 0
    top[i, t]    = sum over j of  x[i, j] where rank[i, j] == t else 0
    top_at[i, t] = sum over j of  j       where rank[i, j] == t else 0

``t`` counts to k and is the last index; either of the two results may be absent. Ranks are a
permutation of the positions, so that each sum has one term. The three blocks become one reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.selection import Selection
from crossfuse.cascade.expressions.to_sympy import to_sympy
from crossfuse.errors import CascadeRefused

_OTHER, _OWN = sympy.symbols("other own", real=True)
_OTHER_AT, _OWN_AT = sympy.symbols("other_at own_at", integer=True)
#: Values and places of another element and of an own one, and whether the other one ranks first.
_CASES = (
    ((9, 1, 5, 3), 1),
    ((9, 4, 5, 3), 1),
    ((1, 1, 5, 3), 0),
    ((1, 4, 5, 3), 0),
    ((5, 1, 5, 3), 1),
    ((5, 4, 5, 3), 0),
    ((5, 3, 5, 3), 0),
)


@dataclass(frozen=True, eq=False)
class _Rank:
    """A block that computes the ranks of a load's elements; `position` is an element's place."""

    block: Block
    load: Any
    position: Any


@dataclass(frozen=True, eq=False)
class _Pick:
    """A block that takes the elements of given ranks: their values, or their places."""

    block: Block
    rank: _Rank
    value: Any
    is_place: bool


def with_selections(blocks: Sequence[Block]) -> list[Block]:
    """Replace blocks of ranks, and those that pick elements by them, by one reduction each.

    Blocks stay in program order; a selection stands where its first pick stood.
    """
    ranks = {each.buffer: rank for each in blocks if (rank := _rank(each)) is not None}
    picks: dict[int, list[_Pick]] = {}
    for block in blocks:
        for buffer in {each.source for each in ir.buffer_loads(block.value)} & set(ranks):
            pick = _pick(block, ranks[buffer])
            if pick is None:
                # Something else is done with the ranks: they stay what they are.
                ranks.pop(buffer)
            else:
                picks.setdefault(id(ranks[buffer].block), []).append(pick)
    found: list[Block] = []
    done: set[int] = set()
    owner = {
        id(p.block): key
        for key, each in picks.items()
        for p in each
        if p.rank.block.buffer in ranks
    }
    for block in blocks:
        if block.buffer in ranks:
            continue
        key = owner.get(id(block))
        if key is None:
            found.append(block)
        elif key not in done:
            done.add(key)
            found += _selections(picks[key])
    return found


def _selections(picks: Sequence[_Pick]) -> list[Block]:
    """Pair picks of values and of places of the same number of elements to one selection each."""
    values = [each for each in picks if not each.is_place]
    places = [each for each in picks if each.is_place]
    found: list[Block] = []
    for number in range(max(len(values), len(places))):
        value = values[number] if number < len(values) else None
        place = places[number] if number < len(places) else None
        if value and place and _count(value.block) != _count(place.block):
            found += [_selection(value, None), _selection(None, place)]
        else:
            found.append(_selection(value, place))
    return found


def _count(block: Block) -> int:
    return block.domain[block.coordinates[-1]]


def _selection(value: _Pick | None, place: _Pick | None) -> Selection:
    known = value or place
    assert known is not None
    block = known.block
    return Selection(
        block.name,
        # Nothing reads the ranks any more, so that their buffer stands for values that none needs.
        value.block.buffer if value else known.rank.block.buffer,
        block.coordinates,
        block.summed,
        block.domain,
        known.value,
        "topk",
        places=place.block.buffer if place else None,
        place=block.summed[0],
        k=_count(block),
    )


def _rank(block: Block) -> _Rank | None:
    """Read a block as one of ranks; None if it is something else."""
    if block.combine != "sum" or len(block.summed) != 1:
        return None
    (other,) = block.summed
    loads = ir.buffer_loads(block.value)
    if not loads or any(not each.source.same_as(loads[0].source) for each in loads):
        return None
    for position in block.coordinates:
        if block.domain[position] != block.domain[other]:
            continue
        own = [each for each in loads if not _follows(each, other)]
        if not own or not _follows(own[0], position):
            continue
        moved = {position: other}
        there = ir.substitute(own[0], lambda var, moved=moved: moved.get(var, var))  # type: ignore[misc]
        symbols = [(there, _OTHER), (own[0], _OWN), (other, _OTHER_AT), (position, _OWN_AT)]
        if _stands_before(_read(block.value, symbols)):
            return _Rank(block, own[0], position)
    return None


def _stands_before(found: sympy.Basic | None) -> bool:
    symbols = (_OTHER, _OTHER_AT, _OWN, _OWN_AT)
    return found is not None and all(
        found.subs(dict(zip(symbols, case, strict=True))) == due for case, due in _CASES
    )


def _pick(block: Block, rank: _Rank) -> _Pick | None:
    """Read a block as one that picks by ranks; None if it is something else."""
    if block.combine != "sum" or len(block.summed) != 1:
        return None
    (at,), place = block.summed, block.coordinates[-1]
    loads = [
        each for each in ir.buffer_loads(block.value) if each.source.same_as(rank.block.buffer)
    ]
    values = dict(zip(rank.block.coordinates, loads[0].indices, strict=True))
    rows = [index for var, index in values.items() if not var.same_as(rank.position)]
    own = all(any(index.same_as(each) for each in block.coordinates[:-1]) for index in rows)
    if not own or len(rows) != len(block.coordinates) - 1 or not values[rank.position].same_as(at):
        return None
    there = ir.substitute(rank.load, lambda var: values.get(var, var))
    level, count = sympy.symbols("level count", integer=True)
    symbols = [(loads[0], level), (there, _OWN), (at, _OWN_AT), (place, count)]
    found = _read(block.value, symbols)
    for is_place, value in ((False, _OWN), (True, _OWN_AT)):
        due = sympy.Piecewise((value, sympy.Eq(level, count)), (0, True))
        if found == due:
            return _Pick(block, rank, there, is_place)
    return None


def _read(value: Any, symbols: Sequence[tuple[Any, sympy.Symbol]]) -> sympy.Basic | None:
    """An expression over given parts of it; None if it has others."""

    def whole(node: Any) -> sympy.Expr | None:
        for part, symbol in symbols:
            if ir.tvm_ffi.structural_equal(node, part):
                return symbol
        return None

    def leaf(node: Any) -> sympy.Expr:
        return sympy.Dummy()

    try:
        found = to_sympy(value, leaf, whole=whole)
    except CascadeRefused:
        return None
    return found if found.free_symbols <= {symbol for _, symbol in symbols} else None


def _follows(load: Any, var: Any) -> bool:
    return any(each.same_as(var) for index in load.indices for each in ir.variables(index))
