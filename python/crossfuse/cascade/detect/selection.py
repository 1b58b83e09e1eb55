"""Reads reductions that say where elements stand: argmax, argmin, and a top-k.

TVM writes an argmax as a block of two stores, of a place and of a value, each of which chooses
between the one that is stored and the one that comes; and the sums of elements and of squares as
one block too.

A top-k may be written as plain reductions, by the rank of each element. The known form, here of the
values ``x[i, j]``; `crossfuse.workload.cascade_build.top_of` has it::

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
from sympy.core.relational import Relational

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block, placement, read_block, shape_of
from crossfuse.cascade.detect.loads import mentions, refused
from crossfuse.cascade.expressions.tir import to_sympy
from crossfuse.errors import CascadeRefused


@dataclass(frozen=True, eq=False)
class Selection(Block):
    """A reduction that chooses among its elements and stores where they stood."""

    #: The buffer of positions of the chosen elements; `buffer` has their values.
    places: Any = None
    #: The position of an element, over the block's variables.
    place: Any = None
    #: The number of results of a ``"topk"``, which the last of `Block.coordinates` counts; else 0.
    k: int = 0

    @property
    def buffers(self) -> tuple[Any, ...]:
        """See `Block`."""
        return (self.buffer,) if self.places is None else (self.buffer, self.places)


# Top-k as topi writes it: a call of TVM's sort, which computes it on the CPU only.

_CALLED = "tvm.contrib.sort.topk"
_SORTED = f"calls of {_CALLED} along the last axis, in descending order"
_INSTEAD_OF_SORTING = "write it as crossfuse.workload.cascade_build.top_of does"


def read_call(node: Any) -> Selection:
    """Read a block of one call of TVM's top-k, as `topi.topk` makes it.

    Refused are other calls, another axis, the smallest elements, and k of 0, which stands for all.
    """
    where = f"block '{node.name_hint}'"
    called = [str(getattr(each, "value", "")) for each in getattr(node.body.value, "args", ())[:1]]
    if called != [_CALLED]:
        found = f"a call {node.body.value}"
        raise refused(where, found, "blocks that store reductions", "write it by stores")
    _, *arrays, k, axis, kind, ascending = node.body.value.args
    source, *made = (_buffer(each) for each in arrays)
    shape = shape_of(source, where)
    count, last = ir.constant(k), len(shape) - 1
    if ir.constant(ascending) or ir.constant(axis) not in (-1, last) or not count:
        found = f"k {k}, axis {axis}" + (", ascending" if ir.constant(ascending) else "")
        raise refused(where, found, _SORTED, _INSTEAD_OF_SORTING)
    names = dict(zip({"both": "vi", "values": "v", "indices": "i"}[kind.value], made, strict=True))
    coordinates = tuple(ir.Var(f"i{place}", "int32") for place in range(len(shape)))
    at = ir.Var("at", "int32")
    domain = dict(zip((*coordinates, at), (*shape[:-1], count, shape[-1]), strict=True))
    value = ir.tirx.BufferLoad(source, [*coordinates[:-1], at])
    if "v" not in names:
        # Values that none needs are kept nowhere.
        names["v"] = ir.tirx.decl_buffer((*shape[:-1], count), str(value.ty), "top")
    return Selection(
        node.name_hint,
        names["v"],
        coordinates,
        (at,),
        domain,
        value,
        "topk",
        places=names.get("i"),
        place=at,
        k=count,
    )


def _buffer(array: Any) -> Any:
    """The buffer whose data an argument of the call passes on."""
    return next(each for each in ir.variables(array) if ir.is_buffer_var(each))


_LIMIT = (
    "reductions by themselves, and argmax or argmin: a value and its place, of equals the first"
)
_INSTEAD = "write it as te.comm_reducer or topi.argmax do, or with one store for each block"
_VALUES = (sympy.Symbol("kept", real=True), sympy.Symbol("coming", real=True))
_PLACES = (sympy.Symbol("kept_place", real=True), sympy.Symbol("coming_place", real=True))


def read_several(loops: tuple[Any, ...], realize: Any) -> list[Block]:
    """Read a block of several stores, within loops.

    It is an argmax or argmin, a top-k that a sort computes, or reductions that do not depend on
    each other; anything else is refused.
    """
    node = realize.block
    if isinstance(node.body, ir.Evaluate):
        return [read_call(node)]
    stores, starts = _stores(node.body), _stores(node.init)
    if stores is None or starts is None or len(stores) != len(starts) or len(stores) < 2:
        raise _refused(node, "a body of several statements")
    for value, place in (stores, stores[::-1]) if len(stores) == 2 else ():
        combine = _combined(value, place)
        if combine:
            return [_selection(loops, realize, value, place, combine, starts)]
    written = [each.buffer for each in stores]
    for store in stores:
        others = [each.source for each in ir.buffer_loads(store.value)]
        if sum(each.same_as(buffer) for each in others for buffer in written) != 1:
            raise _refused(node, "stores that choose or combine in another way")
    return [_alone(loops, realize, store, starts) for store in stores]


def _alone(loops: tuple[Any, ...], realize: Any, store: Any, starts: Sequence[Any]) -> Block:
    """Split one of several reductions off a block."""
    node = realize.block
    init = next(each for each in starts if each.buffer.same_as(store.buffer))
    alone = ir.block_like(node, body=store, init=init)
    return read_block(loops, ir.SBlockRealize(realize.iter_values, realize.predicate, alone))


def _selection(
    loops: tuple[Any, ...],
    realize: Any,
    value: Any,
    place: Any,
    combine: str,
    starts: Sequence[Any],
) -> Selection:
    node = realize.block
    if not access_equal(value, place):
        raise _refused(node, "two stores to different places")
    placed = placement(loops, realize, value)
    coming = [access.replaced([_coming(each)], placed.inside, {})[0] for each in (value, place)]
    initial = next(each.value for each in starts if each.buffer.same_as(value.buffer))
    return Selection(
        node.name_hint,
        value.buffer,
        placed.coordinates,
        placed.summed,
        placed.domain,
        coming[0],
        combine,
        initial=initial,
        places=place.buffer,
        place=coming[1],
    )


def access_equal(one: Any, other: Any) -> bool:
    """Whether two stores are to the same indices of buffers of one shape."""
    pairs = zip(one.indices, other.indices, strict=False)
    alike = len(one.indices) == len(other.indices)
    return alike and all(ir.tvm_ffi.structural_equal(a, b) for a, b in pairs)


def _stores(node: Any) -> list[Any] | None:
    """The stores of a sequence, with its bound values substituted; None for other statements."""
    if not isinstance(node, ir.SeqStmt):
        return None
    bound: dict[Any, Any] = {}
    found = []
    for each in node.seq:
        if isinstance(each, ir.Bind):
            bound[each.var] = ir.substitute(each.value, lambda var: bound.get(var, var))
        elif isinstance(each, ir.BufferStore):
            value = ir.substitute(each.value, lambda var: bound.get(var, var))
            found.append(ir.BufferStore(each.buffer, value, each.indices))
        else:
            return None
    return found


def _coming(store: Any) -> Any:
    """The value that a store chooses if it does not leave the stored one, or None."""
    value = store.value
    if isinstance(value, ir.tirx.Select):
        sides = (value.true_value, value.false_value)
    elif isinstance(value, ir.Call) and str(value.op.name) == ir.IF_THEN_ELSE:
        sides = tuple(value.args[1:])
    elif isinstance(value, ir.tirx.Max | ir.tirx.Min):
        sides = (value.a, value.b)
    else:
        return None
    kept = [_is_kept(each, store) for each in sides]
    return sides[kept.index(False)] if sorted(kept) == [False, True] else None


def _is_kept(node: Any, store: Any) -> bool:
    return isinstance(node, ir.TensorLoad) and node.source.same_as(store.buffer)


def _combined(value: Any, place: Any) -> str:
    """The choice that two stores make: ``"argmax"``, ``"argmin"``, or none."""
    coming = (_coming(value), _coming(place))
    if coming[0] is None or coming[1] is None:
        return ""
    rules = [_rule(each, value, place, coming) for each in (value, place)]
    if None in rules:
        return ""
    for name, kept_wins in (("argmax", 1), ("argmin", -1)):
        if all(_chooses(*rules, kept=kept_wins, earlier=earlier) for earlier in (True, False)):
            return name
    return ""


def _rule(store: Any, value: Any, place: Any, coming: tuple[Any, Any]) -> sympy.Basic | None:
    def whole(node: Any) -> sympy.Expr | None:
        for own, symbols, each in ((value, _VALUES, coming[0]), (place, _PLACES, coming[1])):
            if _is_kept(node, own):
                return symbols[0]
            if ir.tvm_ffi.structural_equal(node, each):
                return symbols[1]
        return None

    def leaf(node: Any) -> sympy.Expr:
        return sympy.Symbol(str(node))

    found = to_sympy(store.value, leaf, whole=whole)
    compared = [set(each.args) for each in found.atoms(Relational)]
    return found if all(each in (set(_VALUES), set(_PLACES)) for each in compared) else None


def _chooses(value: sympy.Basic, place: sympy.Basic, *, kept: int, earlier: bool) -> bool:
    """Whether the better value wins, and of equal ones the one that stood first.

    The element that comes stands after the stored one in a loop, so a rule that leaves what is
    stored may ignore places; one that compares places must prefer the lower one both ways.
    """
    order = {_PLACES[0]: 3 if earlier else 9, _PLACES[1]: 5}
    for difference in (kept, -kept):
        case = order | {_VALUES[0]: 10 + difference, _VALUES[1]: 10}
        place_of, value_of = (each[0 if difference == kept else 1] for each in (_PLACES, _VALUES))
        if (value.subs(case), place.subs(case)) != (case[value_of], case[place_of]):
            return False
    case = {_PLACES[0]: 3, _PLACES[1]: 5, _VALUES[0]: 10, _VALUES[1]: 10}
    return bool(place.subs(case) == 3)


def _refused(node: Any, found: str) -> Exception:
    return refused(f"block '{node.name_hint}'", found, _LIMIT, _INSTEAD)


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
        for buffer in block.sources & set(ranks):
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
            found += [_picked(value, None), _picked(None, place)]
        else:
            found.append(_picked(value, place))
    return found


def _count(block: Block) -> int:
    return block.domain[block.coordinates[-1]]


def _picked(value: _Pick | None, place: _Pick | None) -> Selection:
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
        own = [each for each in loads if not mentions(each.indices, other)]
        if not own or not mentions(own[0].indices, position):
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
