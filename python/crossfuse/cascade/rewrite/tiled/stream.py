"""Writes the stream of a tile of rows: its state, and the updates by tiles of the axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.loads import mentions
from crossfuse.cascade.rewrite.phases import combined
from crossfuse.cascade.rewrite.scripting import held, loop
from crossfuse.cascade.rewrite.tiled.state import BlockBuilder, Local, State
from crossfuse.cascade.rewrite.tiled.steps import (
    Carry,
    Multiply,
    Reduce,
    Statement,
    Tile,
)
from crossfuse.cascade.rewrite.tiled.tile_context import DEPTH, Extent, Product, whole
from crossfuse.cascade.rewrite.tiles import tiles_refused

# Staging: tiles of operands in shared memory, and the products that make elements.

SHARED = "shared.dyn"
#: Bound of the analyzer for an index that is read from a tensor.
_UNBOUNDED = 2**31


class Staging:
    """Writes loads into shared memory, each tile once."""

    def __init__(self, builder: BlockBuilder) -> None:
        self.builder = builder
        self.context = builder.context
        self.made: list[tuple[Any, Local]] = []

    def stage(self, load: Any, *, shared: bool) -> Local:
        """The tile of a load, which is written unless it lies in one that is there.

        `shared` loads are the same for all rows of a tile.
        """
        rows = self.context.rows
        indices = tuple(rows.shared(each) if shared else each for each in load.indices)
        for source, tile in self.made:
            if source.same_as(load.source) and self._within(indices, tile.indices):
                return self._known(load, Local(tile.buffer, indices))
        used = self._in_order(indices)
        shape = tuple(self._bound(each, used) for each in indices)
        name = f"{load.source.name}_shared"
        tile = Local(held(name, shape, str(load.ty), SHARED), indices)
        moved = ir.tirx.BufferLoad(load.source, list(indices))
        with self.builder.block(name, used) as place:
            tile.store(place, self.builder.read(moved, place))
        self.made.append((load.source, tile))
        return self._known(load, tile)

    def _in_order(self, indices: Sequence[Any]) -> list[Any]:
        """Loops of a tile, in the order in which its dimensions use them."""
        found: list[Any] = []
        for index in indices:
            for each in self.builder.extents:
                if mentions([index], each) and not any(each.same_as(o) for o in found):
                    found.append(each)
        return found

    def _known(self, load: Any, tile: Local) -> Local:
        self.builder.staged.append((load, tile))
        return tile

    def forget(self, count: int) -> None:
        """Forget all tiles but the first ones: a later step loads others."""
        del self.made[count:]

    def _within(self, indices: Sequence[Any], others: Sequence[Any]) -> bool:
        return all(map(self._covers, others, indices))

    def _covers(self, other: Any, index: Any) -> bool:
        if ir.tvm_ffi.structural_equal(other, index):
            return True
        plain = isinstance(other, ir.Var) and isinstance(index, ir.Var)
        if not plain or other not in self.builder.extents or index not in self.builder.extents:
            return False
        theirs, own = self.builder.extents[other], self.builder.extents[index]
        fixed = all(ir.constant(each.base) == 0 for each in (theirs, own))
        return fixed and own.limit is None and own.domain <= theirs.domain

    def _bound(self, index: Any, used: Sequence[Any]) -> int:
        """Elements of a dimension, those beyond the tensor included."""
        known = ir.sym.Analyzer()
        for each in used:
            known.bind(each, ir.tvm.ir.Range(0, self.builder.extents[each].domain))
        last = int(known.const_int_bound(index).max_value)
        if last >= _UNBOUNDED:
            raise tiles_refused(
                "an index of a tile",
                found=str(index),
                limit="places that follow from the loops, not from elements of a tensor",
                instead="gather before the product, or leave the cascade to separate kernels",
            )
        return last + 1

    def depth(self, product: Product) -> int:
        """Elements that a product sums at a time."""
        size = self.context.tiles.depth
        return size if self.context.one_product_of_whole_rows else min(size, product.extents[0])

    def is_resident(self, product: Product) -> bool:
        """Whether the left operand stays for all steps: the whole depth is there at once."""
        one = self.context.one_product_of_whole_rows
        return not one and self.depth(product) >= product.extents[0]

    def hold(self, product: Product) -> None:
        """Stage a left operand that stays, before the stream begins."""
        for var, extent in zip(product.depth, product.extents, strict=True):
            self.builder.extents[var] = Extent("d", extent, extent, whole(0))
        if self.is_resident(product):
            self.stage(product.left, shared=False)

    def multiply(self, product: Product) -> None:
        """Compute a tile of elements: ``S = Q K^T``."""
        builder = self.builder
        used = [
            e
            for e in (*self.context.site.rows, self.context.site.axis)
            if mentions(product.result.indices, e)
        ]
        name = str(product.result.source.name)
        domains = [self._bound(each, used) for each in product.result.indices]
        result = Local(
            held(name, tuple(domains), self.context.dtype, "local"), tuple(product.result.indices)
        )
        if self.is_resident(product):
            self._product(product, result, used)
        else:
            extent, size = product.extents[0], self.depth(product)
            count = -(-extent // size)
            with loop(DEPTH, count) as turn:
                limit = extent if extent % size else None
                builder.extents[product.depth[0]] = Extent(
                    "d", count * size, size, turn * size, limit
                )
                kept, known = len(self.made), len(builder.staged)
                self._product(product, result, used)
                self.forget(kept)
                del builder.staged[known:]
        self._known(product.result, result)

    def _product(self, product: Product, result: Local, used: Sequence[Any]) -> None:
        left = self.stage(product.left, shared=False)
        right = self.stage(product.right, shared=True)
        place = self.builder.block(
            f"{result.buffer.name}_product", (*self.context.groups, *used), product.depth
        )
        with place as at:
            with ir.script.init():
                result.store(at, ir.tirx.const(0.0, self.context.dtype))
            factors = [each.load(at).astype(self.context.dtype) for each in (left, right)]
            result.store(at, result.load(at) + factors[0] * factors[1])


class Stream(State):
    """Writes the statements of a tile of rows."""

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__(builder)
        self.axis = self.context.site.axis
        self.staging = Staging(builder)
        self.rounded: dict[tuple[sympy.Expr, str], Local] = {}

    def begin(self) -> None:
        """Stage left operands that stay, and initialise the state."""
        for product in self.context.products:
            self.staging.hold(product)
        super().begin()

    def step(self) -> None:
        """Take in a tile of the axis."""
        for statement in self.context.steps:
            self._load(statement)
            self.write(statement)

    def _load(self, statement: Statement) -> None:
        """Stage or compute the operands of a statement that are not there yet."""
        for symbol in sorted(_symbols(statement), key=lambda each: each.name):
            made = next((e for e in self.context.products if e.symbol == symbol), None)
            read = self.context.read(symbol)
            if made is not None and not self._is_known(made.result):
                self.staging.multiply(made)
            for load in ir.buffer_loads(read) if read is not None else []:
                if self._is_tile(load) and not self._is_known(load):
                    self.staging.stage(load, shared=symbol in self.context.columned)

    def _is_known(self, load: Any) -> bool:
        return any(ir.tvm_ffi.structural_equal(load, each) for each, _ in self.builder.staged)

    def _is_tile(self, load: Any) -> bool:
        """Whether a load is staged: an operand of a product, or the only elements of each row.

        Masks and biases beside a product of each row and element are read where they are used.
        """
        if not mentions(load.indices, self.axis):
            return False
        if any(mentions(load.indices, each) for each in self.context.columns):
            return True
        return not self.context.products and mentions(load.indices, self.context.rows.var)

    def tile(self, statement: Tile) -> None:
        """Write ``P = exp2(x - m_safe)``."""
        self.define(statement, (*self.rows, self.axis), statement.symbol.name)

    def carry(self, statement: Carry) -> None:
        """Write ``s = s * c``."""
        slot = statement.slot
        with self.builder.block(f"{slot.name}_carry", self.places_of(slot)) as at:
            self.state[slot.name].store(at, self.builder.write(statement.expression, at))

    def reduce(self, statement: Reduce) -> None:
        """Write ``s += P``."""
        slot, state = statement.slot, self.state[statement.slot.name]
        with self.builder.block(f"{slot.name}_update", self.places_of(slot), [self.axis]) as at:
            coming = self.builder.write(statement.expression, at)
            if slot.name in self.selections:
                self.selections[slot.name].insert(at, coming, at[self.axis])
            else:
                state.store(at, combined(slot.monoid, state.load(at), coming, self.context.dtype))

    def multiply(self, statement: Multiply) -> None:
        """Write ``O += P V``, P rounded to the type of V."""
        slot, dtype = statement.slot, self.context.dtype
        (load,) = ir.buffer_loads(self.context.read(statement.right))
        left = self._rounded(statement.left, self.context.cast(slot, str(load.ty)))
        over = (*self.context.groups, *self.places_of(slot))
        state = self.state[slot.name]
        with self.builder.block(f"{slot.name}_product", over, [self.axis]) as at:
            right = self.builder.read(self.context.read(statement.right), at).astype(dtype)
            state.store(at, state.load(at) + left.load(at).astype(dtype) * right)

    def _rounded(self, left: sympy.Expr, dtype: str) -> Local:
        """A tile in the type in which it is multiplied."""
        over = (*self.rows, self.axis)
        read = self.context.read(left)
        if read is not None:  # an element as it is
            for load, tile in self.builder.staged:
                if ir.tvm_ffi.structural_equal(load, read) and tile.buffer.ty.dtype == dtype:
                    return tile
        elif dtype == self.context.dtype:
            return self.builder.symbols[left]
        if (left, dtype) not in self.rounded:
            local = self.builder.local(f"{left.name}_rounded", over, dtype)
            with self.builder.block(f"{left.name}_round", over) as at:
                local.store(at, self.builder.write(left, at))
            self.rounded[left, dtype] = local
        return self.rounded[left, dtype]


def _symbols(statement: Statement) -> set[sympy.Symbol]:
    if isinstance(statement, Multiply):
        return statement.left.free_symbols | {statement.right}
    expression = getattr(statement, "expression", sympy.S.Zero)
    return set(expression.free_symbols)
