"""The state of a tile of rows: numbers of each row, and of each row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from crossfuse.cascade.derivation import Slot, guarded, new, value
from crossfuse.cascade.rewrite.tiled.ground import Ground, Local
from crossfuse.cascade.rewrite.tiled.selections import Selection, index_symbol, is_selection, width
from crossfuse.cascade.rewrite.tiled.steps import Factor, Guard, Keep, Tile, kept


class State:
    """Writes the blocks of a state.

    Parameters
    ----------
    ground : Ground
        Where blocks are written.
    """

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.frame = ground.frame
        self.rows = tuple(self.frame.site.rows)
        self.selections: dict[str, Selection] = {}
        self.state = {each.name: self._state(each) for each in self.frame.slots}
        for slot in self.frame.slots:
            for symbol in (value(slot.name), new(slot.name)):
                ground.symbols[symbol] = self.state[slot.name]
            if slot.guard is None:
                ground.symbols[guarded(slot.name)] = self.state[slot.name]

    def _state(self, slot: Slot) -> Local:
        ground, dtype = self.ground, self.frame.dtype
        over = self.places_of(slot)
        if not is_selection(slot):
            return ground.local(slot.name, over, dtype)
        local = ground.local(slot.name, over, dtype, (width(slot),))
        places = ground.local(f"{slot.name}_index", over, "int32", (width(slot),))
        self.selections[slot.name] = Selection(slot, local, places)
        return local

    def places_of(self, slot: Slot) -> tuple[Any, ...]:
        """Rows, and columns of a slot."""
        return (*self.rows, *self.frame.columns_of(slot))

    def begin(self) -> None:
        """The state of no elements."""
        for slot in self.frame.slots:
            with self.ground.block(f"{slot.name}_init", self.places_of(slot)) as at:
                init = self.ground.write(slot.init, at)
                if slot.name in self.selections:
                    self.selections[slot.name].begin(at, init)
                else:
                    self.state[slot.name].store(at, init)

    def _row(self, name: str, over: Sequence[Any]) -> Local:
        return self.ground.local(name, over, self.frame.dtype)

    def keep(self, statement: Keep) -> None:
        """``m_old = m``."""
        slot, over = statement.slot, self.places_of(statement.slot)
        local = self.ground.symbols[kept(slot.name)] = self._row(f"{slot.name}_old", over)
        with self.ground.block(f"{slot.name}_keep", over) as at:
            local.store(at, self.state[slot.name].load(at))

    def guard(self, statement: Guard) -> None:
        """``m_safe = select(m == -inf, 0, m)``."""
        slot, over = statement.slot, self.places_of(statement.slot)
        symbol = guarded(slot.name)
        if symbol not in self.ground.symbols:
            self.ground.symbols[symbol] = self._row(f"{slot.name}_safe", over)
        with self.ground.block(f"{slot.name}_guard", over) as at:
            assert slot.guard is not None
            self.ground.symbols[symbol].store(at, self.ground.write(slot.guard, at))

    def factor(self, statement: Factor) -> None:
        """``c = exp2(m_old - m_safe)``."""
        self.define(statement, self.rows, statement.symbol.name)

    def define(
        self,
        statement: Factor | Tile,
        over: Sequence[Any],
        name: str,
        more: Sequence[Any] = (),
    ) -> None:
        """Compute and name a number of each place, once for all that `more` goes through."""
        local = self._row(name, over)
        with self.ground.block(f"{name}_make", [*more, *over]) as at:
            local.store(at, self.ground.write(statement.expression, at))
        self.ground.symbols[statement.symbol] = local

    def finish(self, used: set[sympy.Symbol]) -> None:
        """What stands in for values of the finished state, where results use it."""
        for slot in self.frame.slots:
            if slot.name in self.selections:
                self.ground.symbols[index_symbol(slot)] = self.selections[slot.name].places
            elif slot.guard is not None and guarded(slot.name) in used:
                self.guard(Guard(slot))
