"""The tiles of rows, and of keys, that a CTA goes through, as each role counts them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import Variable, at, let, strides, when
from crossfuse.lower.hopper.stream.plan.kernel import TileOrder
from crossfuse.lower.hopper.stream.program import Stream, StreamProgram
from crossfuse.lower.hopper.stream.seen_keys import VOTERS, load_within, vote


class Tiles:
    """A role's way through the tiles of its CTA: the current tile of rows, and of keys.

    `cta` is the number of the CTA, or of its cluster; `within` has values of the places that tell
    CTAs of a cluster apart.
    """

    def __init__(
        self, order: TileOrder, stream: Stream, cta: Any, within: dict[Any, Any] | None = None
    ) -> None:
        self.order = order
        self._within = within or {}
        self.stream = stream
        self._turn = Variable("turn", "int32", cta)
        self._second = Variable("second", "int32", 0) if order.paired else None
        places = (*order.outer, *([] if order.inner is None else [order.inner]))
        self._places = {each.var: Variable(str(each.var.name), "int32", 0) for each in places}
        self._end = Variable("end_of_stream", "int32", 0)
        self.block = Variable("block", "int32", 0)

    @property
    def places(self) -> dict[Any, Any]:
        """Values of the places of the current tile of rows."""
        own = {var: each.value.astype(str(var.ty)) for var, each in self._places.items()}
        return own | self._within

    @property
    def values(self) -> dict[Any, Any]:
        """The same, with the current tile of keys."""
        var = self.stream.var
        return self.places | {var: self.block.value.astype(str(var.ty))}

    @property
    def next_values(self) -> dict[Any, Any]:
        """The same, with the next tile of keys, which `look_ahead` has found."""
        var = self.stream.var
        return self.places | {var: self._following.astype(str(var.ty))}

    @property
    def _following(self) -> Any:
        return self.block.value + 1

    @property
    def is_left(self) -> Any:
        """Whether there is a tile of rows after this one."""
        return self._turn.value < self.order.turns

    @property
    def is_last_block(self) -> Any:
        """Whether the current tile of keys is the last one."""
        return self.block.value + 1 == self._end.value

    @property
    def has_block(self) -> Any:
        """Whether there is a current tile of keys, not yet past the last one."""
        return self.block.value < self._end.value

    @contextmanager
    def all(self) -> Iterator[None]:
        """Statements for each tile of rows that is left."""
        with ir.script.While(self.is_left):
            self.take()
            yield

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Statements for each tile of keys that is left."""
        with ir.script.While(self.has_block):
            yield
            self.step()

    def look_ahead(self) -> None:
        """Find the next tile of keys; once for each, before anybody asks whether it is the last."""

    def step(self) -> None:
        """Go on to the next tile of keys."""
        self.block.set(self.block.value + 1)

    def one_thread(self) -> AbstractContextManager[None]:
        """Statements for one of the threads that go through the tiles: that is one."""
        return nullcontext()

    def take(self) -> None:
        """Go on to the next tile of rows, and its first tile of keys."""
        turn = self._turn.value
        rest = turn
        if self.order.inner is not None:
            self._places[self.order.inner.var].set(self._inner(turn % self.order.turns_of_head))
            rest = turn // self.order.turns_of_head
        steps = strides(self.order.outer)
        for place in self.order.outer:
            index = rest // steps[place.var]
            if place is not self.order.outer[0]:
                index = index % place.extent
            self._places[place.var].set(index)
        first = at(self.stream.first, self.places).astype("int32")
        self.block.set(first)
        self._end.set(self.block.value + at(self.stream.count, self.places).astype("int32"))
        self._advance()

    def _inner(self, turn: Any) -> Any:
        """Tile of a head, long ones first: short ones fill up the last wave."""
        last = self.order.tiles - 1
        if self._second is None:
            return last - turn if self.order.uneven else turn
        return ir.script.Select(self._second.value == 0, last - turn, turn)

    def _advance(self) -> None:
        ctas = self.order.ctas
        if self._second is None:
            self._turn.set(self._turn.value + ctas)
            return
        # Of an odd number of tiles the one in the middle has no other.
        alone = self._turn.value % self.order.turns_of_head == self.order.tiles // 2
        leaves = self._second.value == 1
        if self.order.tiles % 2:
            leaves = ir.script.Or(leaves, alone)
        leaves = let("leaves_pair", leaves)
        self._second.set(ir.script.Select(leaves, 0, 1))
        with when(leaves):
            self._turn.set(self._turn.value + ctas)


class SeenTiles(Tiles):
    """The same without tiles of keys that no row sees, but for the first one of each tile of rows.

    That one is on its way before flags of the others have come, and so there is one at least. Every
    role looks through the flags by itself, with whole warps, and so all find the same tiles: nobody
    waits for another one's word. A warp loads those of many tiles at once, a byte a thread and
    instruction, and keeps a bit of each tile.

    Where what nobody sees counts for nothing only beside a key that is seen
    (`crossfuse.lower.hopper.stream.program.Seen`), they look for one before they pass by a tile:
    among those that they look at, then among the keys of all CTAs that share a tile of rows.
    """

    def __init__(self, *given: Any, program: StreamProgram, lane: Any, loads: int) -> None:
        super().__init__(*given)
        self._program, self._lane = program, lane
        self._parts = -(-program.tile[1] // VOTERS)
        first, end = self.stream.bounds
        #: Tiles whose flags are loaded at once.
        self._count = max(1, min(loads // self._parts, VOTERS, end - first - 1))
        # Bits of tiles from `_first` on that have not been gone through; the tiles from `_rest` on
        # have not been looked at.
        self._bits = Variable("seen", "uint32", ir.script.uint32(0))
        self._first = Variable("first_of_seen", "int32", 0)
        self._rest = Variable("not_looked_at", "int32", 0)
        self._next = Variable("next_block", "int32", 0)
        needs_some = program.seen is not None and program.seen.needs_some
        self._some = Variable("some_seen", "uint32", ir.script.uint32(0)) if needs_some else None

    @property
    def is_last_block(self) -> Any:
        """Whether the current tile of keys is the last one that is seen."""
        return self._next.value == self._end.value

    @property
    def _following(self) -> Any:
        return self._next.value

    def take(self) -> None:
        """Go on to the next tile of rows, and its first tile of keys."""
        super().take()
        self._bits.set(ir.script.uint32(0))
        self._rest.set(self.block.value + 1)
        if self._some is not None:
            self._some.set(ir.script.uint32(0))

    def look_ahead(self) -> None:
        """Find the next tile of keys that is seen."""
        bits = self._bits
        nothing = bits.value == ir.script.uint32(0)
        with ir.script.While(ir.script.And(nothing, self._rest.value < self._end.value)):
            self._first.set(self._rest.value)
            self._look()
            self._rest.set(self._first.value + self._count)
        found = self._first.value + _lowest(bits.value)
        end = self._end.value
        self._next.set(ir.script.Select(nothing, end, ir.script.min(found, end)))
        bits.set(bits.value & (bits.value - ir.script.uint32(1)))

    def step(self) -> None:
        """Go on to that tile."""
        self.block.set(self._next.value)

    def one_thread(self) -> AbstractContextManager[None]:
        """Statements for one of the threads that go through the tiles."""
        return when(self._lane == 0)

    def _look(self) -> None:
        """Keep a bit of each of the next tiles; those behind the end count as the last one."""
        flags = [
            [self._flag(number, part) for part in range(self._parts)]
            for number in range(self._count)
        ]
        for number, parts in enumerate(flags):
            some = vote(functools.reduce(ir.script.Or, parts)) != ir.script.uint32(0)
            bit = ir.script.Select(some, ir.script.uint32(1 << number), ir.script.uint32(0))
            self._bits.set(self._bits.value | bit)
        if self._some is not None:
            self._some.set(self._some.value | self._bits.value)
            self._find_some(self._some)
            none = self._some.value == ir.script.uint32(0)
            every = ir.script.uint32((1 << self._count) - 1)
            self._bits.set(ir.script.Select(none, every, self._bits.value))

    def _find_some(self, some: Variable) -> None:
        """Look for a key that rows see, tile by tile, of each CTA that shares them."""
        first, end = self.stream.bounds
        split = self._program.split
        sharers = 1 if split is None else split.place.extent
        tile = Variable("looked_at", "int32", 0)
        tile.set(0)
        nothing, count = some.value == ir.script.uint32(0), sharers * (end - first)
        with ir.script.While(ir.script.And(nothing, tile.value < count)):
            known = {self.stream.var: first + tile.value // sharers}
            if split is not None:
                known[split.place.var] = tile.value % sharers
            flags = [self._flag_of(known, part) for part in range(self._parts)]
            some.set(vote(functools.reduce(ir.script.Or, flags)))
            tile.set(tile.value + 1)

    def _flag(self, number: int, part: int) -> Any:
        """Whether this thread's key of some 32 of a tile is seen."""
        block = ir.script.min(self._first.value + number, self._end.value - 1)
        return self._flag_of({self.stream.var: block}, part)

    def _flag_of(self, tile: dict[Any, Any], part: int) -> Any:
        program, keys = self._program, self._program.tile[1]
        assert program.seen is not None
        key = self._lane + part * VOTERS
        if keys < (part + 1) * VOTERS:
            key = ir.script.min(key, keys - 1)
        places = {var: value.astype(str(var.ty)) for var, value in tile.items()}
        known = self.places | places | {program.key: key}

        def load(node: Any, mutator: Any) -> Any:
            return load_within(mutator.default_mutate(node), program)

        flag = ir.mutate(program.seen.flag, (ir.TensorLoad, load))
        return let("flag", ir.substitute(flag, known))


_LOWEST = """\
__device__ __forceinline__ int crossfuse_lowest(unsigned bits) {
  return __ffs((int)bits) - 1;
}
"""


def _lowest(bits: Any) -> Any:
    """Number of the lowest bit that is set."""
    return ir.cuda_func_call("crossfuse_lowest", bits, source_code=_LOWEST, return_type="int32")
