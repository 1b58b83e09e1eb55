"""The state of a tile of rows: begun, and updated by tiles of the axis until it is finished."""

from __future__ import annotations

from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot
from crossfuse.cascade.expressions.to_tir import to_tir
from crossfuse.cascade.rewrite.tiled.ground import Ground, Local
from crossfuse.cascade.rewrite.tiled.operands import mentions
from crossfuse.cascade.rewrite.tiled.staging import Staging
from crossfuse.cascade.rewrite.tiled.state import State
from crossfuse.cascade.rewrite.tiled.steps import (
    Carry,
    Factor,
    Guard,
    Keep,
    Multiply,
    Reduce,
    Statement,
    Tile,
)


class Stream(State):
    """Writes the statements of a tile of rows.

    Parameters
    ----------
    ground : Ground
        Where blocks are written.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self.axis = self.frame.site.axis
        self.staging = Staging(ground)
        self.rounded: dict[tuple[sympy.Expr, str], Local] = {}

    def begin(self) -> None:
        """Left operands that stay, and the state of no elements."""
        for product in self.frame.products:
            self.staging.hold(product)
        super().begin()

    def step(self) -> None:
        """Take in a tile of the axis."""
        for statement in self.frame.steps:
            self._load(statement)
            _WRITERS[type(statement)](self, statement)

    def _load(self, statement: Statement) -> None:
        """What a statement reads of the tile, unless it is there."""
        for symbol in sorted(_symbols(statement), key=lambda each: each.name):
            made = next((e for e in self.frame.products if e.symbol == symbol), None)
            read = self.frame.read(symbol)
            if made is not None and not self._is_known(made.result):
                self.staging.multiply(made)
            for load in ir.buffer_loads(read) if read is not None else []:
                if self._is_tile(load) and not self._is_known(load):
                    self.staging.stage(load, shared=symbol in self.frame.columned)

    def _is_known(self, load: Any) -> bool:
        return any(ir.tvm_ffi.structural_equal(load, each) for each, _ in self.ground.staged)

    def _is_tile(self, load: Any) -> bool:
        """Whether a load is staged: what is multiplied, or the only elements of each row.

        Masks and biases beside a product of each row and element are read where they are used.
        """
        if not mentions(load.indices, self.axis):
            return False
        if any(mentions(load.indices, each) for each in self.frame.columns):
            return True
        return not self.frame.products and mentions(load.indices, self.frame.rows.var)

    def tile(self, statement: Tile) -> None:
        """``P = exp2(x - m_safe)``."""
        self.define(statement, (*self.rows, self.axis), statement.symbol.name)

    def carry(self, statement: Carry) -> None:
        """``s = s * c``."""
        slot = statement.slot
        with self.ground.block(f"{slot.name}_carry", self.places_of(slot)) as at:
            self.state[slot.name].store(at, self.ground.write(statement.expression, at))

    def reduce(self, statement: Reduce) -> None:
        """``s += P``."""
        slot, state = statement.slot, self.state[statement.slot.name]
        with self.ground.block(f"{slot.name}_update", self.places_of(slot), [self.axis]) as at:
            coming = self.ground.write(statement.expression, at)
            if slot.name in self.selections:
                self.selections[slot.name].insert(at, coming, at[self.axis])
            else:
                state.store(at, self._combined(slot, state.load(at), coming))

    def _combined(self, slot: Slot, one: Any, other: Any) -> Any:
        a, b = sympy.symbols("a b", real=True)
        combined = slot.monoid.combine(a, b)
        return to_tir(combined, {a: one, b: other}, self.frame.dtype)

    def multiply(self, statement: Multiply) -> None:
        """``O += P V``, P rounded to the type of V."""
        slot, dtype = statement.slot, self.frame.dtype
        (load,) = ir.buffer_loads(self.frame.read(statement.right))
        left = self._rounded(statement.left, self.frame.cast(slot, str(load.ty)))
        group = self.frame.rows.group
        over = [*([] if group is None else [group]), *self.places_of(slot)]
        state = self.state[slot.name]
        with self.ground.block(f"{slot.name}_product", over, [self.axis]) as at:
            right = self.ground.read(self.frame.read(statement.right), at).astype(dtype)
            state.store(at, state.load(at) + left.load(at).astype(dtype) * right)

    def _rounded(self, left: sympy.Expr, dtype: str) -> Local:
        """A tile in the type in which it is multiplied."""
        over = (*self.rows, self.axis)
        read = self.frame.read(left)
        if read is not None:  # an element as it is
            for load, tile in self.ground.staged:
                if ir.tvm_ffi.structural_equal(load, read) and tile.buffer.ty.dtype == dtype:
                    return tile
        elif dtype == self.frame.dtype:
            return self.ground.symbols[left]
        if (left, dtype) not in self.rounded:
            local = self.ground.local(f"{left.name}_rounded", over, dtype)
            with self.ground.block(f"{left.name}_round", over) as at:
                local.store(at, self.ground.write(left, at))
            self.rounded[left, dtype] = local
        return self.rounded[left, dtype]


def _symbols(statement: Statement) -> set[sympy.Symbol]:
    if isinstance(statement, Multiply):
        return statement.left.free_symbols | {statement.right}
    expression = getattr(statement, "expression", sympy.S.Zero)
    return set(expression.free_symbols)


_WRITERS: dict[type, Any] = {
    Keep: Stream.keep,
    Guard: Stream.guard,
    Factor: Stream.factor,
    Tile: Stream.tile,
    Carry: Stream.carry,
    Reduce: Stream.reduce,
    Multiply: Stream.multiply,
}
