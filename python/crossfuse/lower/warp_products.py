"""The pass that gives products of a warp to its tensor cores.

A schedule says who multiplies what as plain loops (`crossfuse.schedule.rules.skinny`): four lanes
share a column of the weights, each multiplies eight neighbouring elements of it by those of every
row, and the four sums are added up. That is what two ``mma.m16n8k16`` do: which elements of the
reduction a lane holds is free, as long as both operands agree. So weights go from memory to
registers, 16 bytes a load, and are an operand as they lie there; nothing passes through shared
memory but sums of warps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import MMA_GROUPS, MMA_LANES
from crossfuse.lower.mma import (
    SQUARES,
    SUMS,
    TYPES,
    add_squares,
    multiply_vectors,
    squares_of_lane,
)
from crossfuse.markers import COLUMN, ELEMENT, LANE, ROW, ROW_TILE, TERM, WARP_PRODUCT, ZERO

#: Columns of the weights that a thread has in a fragment of 16.
_COLUMNS = 2


def multiply_by_warps() -> Any:
    """Pass: loops marked `WARP_PRODUCT` become instructions of tensor cores.

    A thread keeps the sums that a fragment gives it, of two columns and two of eight rows, instead
    of its share of those of every row::

        for column in 2, row in rows, e in 8:       for e in 8: x[e] = A[lane // 4, ... + e]
            sums[lane % 4, row, column] +=          mma(sums, weights[0], weights[1], x)
                A[row, ... + e] * weights[column, e]

        for row in 2, column in 2:                  for row in 2, column in 2:
            for l in 4: of_warp[...] += sums[l, ...]    of_warp[...] = sums[2 * column + row]

    Rows that the left operand does not have are read as its last one, and nobody uses their sums.
    It runs on loops without blocks, before any is unrolled or vectorised.
    """

    def transform(func: Any) -> Any:
        body = _Multiplied(func.body).body
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return ir.prim_func_pass("MultiplyByWarps", transform)


@dataclass(frozen=True, eq=False)
class _Product:
    """A nest that multiplies elements of some columns by those of all rows."""

    #: Loops by what they count.
    loops: Mapping[str, Any]
    #: Buffer of the sums, an element of the left operand, and a load of the weights.
    sums: Any
    left: Any
    weights: Any
    #: The thread's registers for sums of all of its columns and rows.
    registers: Any
    #: Lanes that share a column. Of more than four, each four are a row of a fragment, and multiply
    #: by columns of their own.
    lanes: int

    @property
    def parts(self) -> int:
        """Rows of a fragment that a column of the weights takes."""
        return self.lanes // MMA_LANES

    @property
    def beside(self) -> int:
        """Columns of a fragment for the rows of the left operand, of each part."""
        return MMA_GROUPS // self.parts

    @property
    def columns(self) -> int:
        """Columns of a thread."""
        return int(self.loops[COLUMN].extent)

    @property
    def rows(self) -> int:
        """Rows of the left operand."""
        return int(self.loops[ROW].extent)

    @property
    def row_tiles(self) -> int:
        """Fragments that hold all rows."""
        return -(-self.rows // self.beside)

    @property
    def _places(self) -> int:
        """Fragments that have registers: lanes exchange sums of one for each part."""
        return -(-self.rows // MMA_GROUPS) * self.parts

    def first(self, column: Any, row_tile: Any) -> Any:
        """Register of the first sum of a fragment that holds a column and rows."""
        return (column // _COLUMNS * self._places + row_tile) * SUMS

    @property
    def count(self) -> int:
        """Registers for all sums."""
        return self.columns // _COLUMNS * self._places * SUMS

    @property
    def makes_rows(self) -> bool:
        """Whether elements of the left operand are made of others, and not just loaded."""
        return not isinstance(self.left, ir.TensorLoad)

    def has_rows_of(self, other: _Product) -> bool:
        """Whether the left operand is that of another product, in loops of its own."""
        images = {self.loops[each].loop_var: other.loops[each].loop_var for each in (ROW, ELEMENT)}
        return ir.alike(ir.substitute(self.left, images), other.left)

    def load(self, lane: Any) -> tuple[Any, list[Any]]:
        """Registers for the rows of a lane, and statements that load these."""
        kind = str(self.weights.source.ty.dtype)
        rows = ir.tirx.decl_buffer([self.row_tiles, _VECTOR], kind, "rows", scope="local")
        statements = [ir.AllocBuffer(rows)]
        for tile in range(self.row_tiles):
            statements += self._load(rows, tile, lane)
        return rows, statements

    def multiply(self, rows: Any) -> list[Any]:
        """Statements that multiply each fragment of columns by rows in registers."""
        kind = str(self.weights.source.ty.dtype)
        statements = []
        for column in range(0, self.columns, _COLUMNS):
            pair = [self._weights(column + each) for each in range(_COLUMNS)]
            for tile in range(self.row_tiles):
                sums = _address(self.registers, self.first(column, tile))
                call = multiply_vectors(kind, sums, pair[0], pair[1], _address(rows, tile, 0))
                statements.append(ir.Evaluate(call))
        return statements

    def _load(self, rows: Any, tile: int, lane: Any) -> list[Any]:
        """Load the vector that a lane multiplies, of its row and its part of the lanes.

        Where elements are made of others, these are loaded, and the vector is made of them.
        """
        group = lane // MMA_LANES
        row = ir.tirx.min(group % self.beside + tile * self.beside, self.rows - 1)
        other = group // self.beside * MMA_LANES + lane % MMA_LANES
        value = ir.substitute(self.left, {self.loops[ROW].loop_var: row, lane: other})
        element = self.loops[ELEMENT]
        place = [ir.tirx.IntImm("int32", tile), element.loop_var]

        def by_element(kind: Any, store: Any) -> Any:
            return ir.for_like(element, store, kind=kind, annotations={})

        if isinstance(value, ir.TensorLoad):
            return [by_element(ir.ForKind.VECTORIZED, ir.BufferStore(rows, value, place))]
        loads = ir.buffer_loads(value)
        vectors = [_vector(each) for each in loads]
        statements: list[Any] = []
        for vector, each in zip(vectors, loads, strict=True):
            stored = ir.BufferStore(vector, each, [element.loop_var])
            statements += [ir.AllocBuffer(vector), by_element(ir.ForKind.VECTORIZED, stored)]
        if _is_rounded_product(value):
            made = _address(rows, tile, 0)
            return [*statements, _product_of(made, *(_address(each, 0) for each in vectors))]
        of = dict(zip(loads, vectors, strict=True))
        value = ir.mutate(value, (ir.TensorLoad, lambda load, _: of[load][element.loop_var]))
        stored = ir.BufferStore(rows, value, place)
        return [*statements, by_element(ir.ForKind.UNROLLED, stored)]

    def _weights(self, column: int) -> Any:
        images = {self.loops[COLUMN].loop_var: column, self.loops[ELEMENT].loop_var: 0}
        constants = {each: ir.tirx.IntImm("int32", image) for each, image in images.items()}
        return _address(self.weights.source, *ir.substitute(self.weights, constants).indices)

    def of_all_lanes(self, column: Any, row_tile: Any) -> tuple[list[Any], Any]:
        """Statements that add up a column for all lanes, and the sum of the row that a lane has.

        A row tile has as many rows as there are lanes, those of a fragment for each part. All lanes
        exchange sums, whatever each of them stores.
        """
        own = column % _COLUMNS * _COLUMNS
        sums = [
            self.registers[self.first(column, row_tile * self.parts + part) + own + each]
            for part in range(self.parts)
            for each in range(_COLUMNS)
        ]
        name = "crossfuse_add_parts"
        call = ir.cuda_func_call(name, *sums, source_code=_ADD_PARTS, return_type="float32")
        found = ir.tirx.decl_buffer([1], "float32", "of_all_lanes", scope="local")
        return [ir.AllocBuffer(found), ir.BufferStore(found, call, [0])], found[0]

    def zero(self) -> Any:
        """Statement: no sum has anything yet."""
        return _filled(self.registers, ir.tirx.FloatImm("float32", 0))


_VECTOR = 8
#: Of eight lanes that share a column, the first four have one part of the reduction and the others
#: the other. A fragment has the sums of both parts with the rows of both: those that belong
#: together are in lanes 0 and 1, of rows 0 and 1 and of 2 and 3, and in 6 and 7. Lanes of one part
#: keep the rows of the first fragment, those of the other of the second one; then each takes its
#: row from the lane that has it.
_ADD_PARTS = """\
__device__ __forceinline__ float crossfuse_add_parts(
    float first_even, float first_odd, float second_even, float second_odd) {
  const unsigned all = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32;
  const bool second = lane & 4;
  float even = second ? second_even : first_even, odd = second ? second_odd : first_odd;
  even += __shfl_xor_sync(all, second ? first_even : second_even, 6);
  odd += __shfl_xor_sync(all, second ? first_odd : second_odd, 6);
  const int from = (lane & 24) + (second ? 6 : 0) + (lane >> 1 & 1);
  even = __shfl_sync(all, even, from);
  odd = __shfl_sync(all, odd, from);
  return lane & 1 ? odd : even;
}
"""


_ADD_WARP = """\
__device__ __forceinline__ float crossfuse_add_warp(float sum) {
  #pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  return sum;
}
"""


#: As exact as in float32: a product of two elements of bfloat16 has all its bits there, and is
#: rounded once. Half as many instructions let nvcc unroll the loop, and so load ahead.
_ELEMENTS = """\
__device__ __forceinline__ void crossfuse_multiply_elements(
    void* made, const void* one, const void* other) {
  #pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    ((nv_bfloat162*)made)[pair] =
        __hmul2(((const nv_bfloat162*)one)[pair], ((const nv_bfloat162*)other)[pair]);
  }
}
"""


def _is_rounded_product(value: Any) -> bool:
    """Whether a value is the product of two loaded elements of bfloat16, rounded to it again."""
    if not isinstance(value, ir.tirx.Cast) or not isinstance(value.value, ir.tirx.Mul):
        return False
    factors = (value.value.a, value.value.b)
    return str(value.ty) == "bfloat16" and all(
        isinstance(each, ir.tirx.Cast)
        and isinstance(each.value, ir.TensorLoad)
        and str(each.value.ty) == "bfloat16"
        for each in factors
    )


def _product_of(*addresses: Any) -> Any:
    name = "crossfuse_multiply_elements"
    return ir.Evaluate(ir.cuda_func_call(name, *addresses, source_code=_ELEMENTS))


def _vector(load: Any) -> Any:
    """Registers for what a lane loads of a tensor at once."""
    dtype = str(load.source.ty.dtype)
    return ir.tirx.decl_buffer([_VECTOR], dtype, f"{load.source.name}_vector", scope="local")


def _address(buffer: Any, *indices: Any) -> Any:
    return ir.tirx.address_of(ir.tirx.BufferLoad(buffer, list(indices)))


class _Multiplied:
    """A body whose marked loops are instructions."""

    def __init__(self, body: Any) -> None:
        loops = ir.nodes(body, ir.For)
        self.lanes = {
            load.source: int(each.extent)
            for each in loops
            if _role(each) == LANE
            for load in ir.buffer_loads(*(e.value for e in ir.nodes(each.body, ir.BufferStore)))
        }
        every = [self._product(each) for each in loops if _role(each) == COLUMN]
        self.products = {each.sums: each for each in every if each is not None}
        of_warp = {each for each in self.lanes if str(each.scope()) == "warp"}
        #: Buffers in which lanes add up squares of what they load, by tensor cores.
        self.squares = {
            of_squares.buffer
            for each in loops
            if _role(each) == TERM
            and (of_squares := _squares(each))
            and of_squares.buffer in of_warp
        }
        #: Registers in the place of other buffers that have an element for each lane.
        self.registers = {
            each: ir.tirx.decl_buffer(
                [SQUARES if each in self.squares else 1],
                str(each.ty.dtype),
                f"{each.name}_own",
                scope="local",
            )
            for each in of_warp.difference(self.products)
        }
        #: Threads of a warp, of the launch that is looked at.
        self.lane: Any = None
        #: Loops around a statement by what they count.
        self.around: dict[str, Any] = {}
        changes = (
            (ir.AttrStmt, self._launch),
            (ir.AllocBuffer, self._allocate),
            (ir.For, self._loop),
            (ir.SeqStmt, self._sequence),
        )
        self.body = ir.mutate(body, *changes) if self.products else body
        if self.registers:
            self.body = ir.mutate(
                self.body, (ir.BufferStore, self._store), (ir.TensorLoad, self._own)
            )

    def _launch(self, node: Any, mutator: Any) -> Any:
        if str(node.attr_key) == "thread_extent" and str(node.node.thread_tag) == "threadIdx.x":
            self.lane = node.node.var
        return mutator.default_mutate(node)

    def _allocate(self, node: Any, mutator: Any) -> Any:
        product = self.products.get(node.buffer)
        registers = product.registers if product else self.registers.get(node.buffer)
        return mutator.default_mutate(node) if registers is None else ir.AllocBuffer(registers)

    def _store(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        own = self.registers.get(node.buffer)
        if own is not None and node.buffer in self.squares:  # they begin with nothing
            return _filled(own, node.value)
        return node if own is None else ir.BufferStore(own, node.value, [0])

    def _own(self, node: Any, mutator: Any) -> Any:
        own = self.registers.get(node.source)
        return mutator.default_mutate(node) if own is None else own[0]

    def _loop(self, node: Any, mutator: Any) -> Any:
        role = _role(node)
        if role == ZERO:
            (store,) = ir.nodes(node.body, ir.BufferStore)
            return self.products[store.buffer].zero()
        if role == COLUMN and (product := self._product(node)) is not None:
            return self._multiplied([self.products[product.sums]])
        if role == LANE:
            return self._add_up(node)
        if role == TERM and (squares := _squares(node)) is not None:
            registers = self.registers[squares.buffer]
            return ir.Evaluate(squares.added_to(_address(registers, 0)))
        if role:
            self.around[role] = node.loop_var
        return mutator.default_mutate(node)

    def _sequence(self, node: Any, mutator: Any) -> Any:
        """Products side by side, such as gate and up: those of the same rows make these once."""
        loops = [each for each in node.seq if isinstance(each, ir.For)]
        read = [self._product(each) for each in loops if _role(each) == COLUMN]
        if len(read) < max(2, len(node.seq)) or not all(each and each.makes_rows for each in read):
            return mutator.default_mutate(node)
        return self._multiplied([self.products[each.sums] for each in read if each])

    def _multiplied(self, products: Sequence[_Product]) -> Any:
        """Products in the place of their nests."""
        statements: list[Any] = []
        first, rows = products[0], None
        for each in products:
            if rows is None or not each.has_rows_of(first):
                rows, loads = each.load(self.lane)
                statements += loads
            statements += each.multiply(rows)
        return ir.SeqStmt(statements)

    def _product(self, loop: Any) -> _Product | None:
        """Read the nest below a loop over columns; None if it is that of other loops."""
        loops = {_role(each): each for each in (loop, *ir.nodes(loop.body, ir.For))}
        if ELEMENT not in loops:
            return None
        (store,) = ir.nodes(loop.body, ir.BufferStore)
        left, weights = (each.value for each in (store.value.b.a, store.value.b.b))  # of casts
        name, kind = f"{store.buffer.name}_sums", str(store.buffer.ty.dtype)
        product = _Product(loops, store.buffer, left, weights, None, self.lanes[store.buffer])
        registers = ir.tirx.decl_buffer([product.count], kind, name, scope="local")
        return replace(product, registers=registers)

    def _add_up(self, loop: Any) -> Any:
        """The sum of all lanes: a tensor core added up those of each four."""
        (update,) = (
            each
            for each in ir.nodes(loop.body, ir.BufferStore)
            if isinstance(each.value, ir.tirx.Add)
        )
        condition = getattr(loop.body, "condition", None)
        if (own := self.registers.get(update.value.b.source)) is not None:
            squares = update.value.b.source in self.squares
            of_lane = squares_of_lane(_address(own, 0)) if squares else own[0]
            return _of_warp(own, of_lane, update, self.lane, condition)
        product = self.products[update.value.b.source]
        column = self.around[COLUMN]
        if product.parts == 1:
            first = product.first(column, self.around[ROW_TILE])
            value = product.registers[first + column % _COLUMNS * _COLUMNS + self.around[ROW]]
            before: list[Any] = []
        else:
            before, value = product.of_all_lanes(column, self.around[ROW_TILE])
        stored = ir.BufferStore(update.buffer, value, list(update.indices))
        if condition is not None and not ir.mentions(condition, loop.loop_var):
            stored = ir.IfThenElse(condition, stored, None)
        return ir.SeqStmt([*before, stored]) if before else stored


@dataclass(frozen=True, eq=False)
class _Squares:
    """Squares of what a lane has loaded, eight elements of 16 bits, in a lane's sum."""

    buffer: Any
    load: Any

    def added_to(self, sums: Any) -> Any:
        """Call that adds them to the registers at an address."""
        vector = _address(self.load.source, *self.load.indices)
        return add_squares(str(self.load.source.ty.dtype), sums, vector)


def _squares(loop: Any) -> _Squares | None:
    """Read a loop over the elements of a load; None where it sums something else."""
    (store,) = ir.nodes(loop.body, ir.BufferStore)
    added = store.value.b if isinstance(store.value, ir.tirx.Add) else None
    if not isinstance(added, ir.tirx.Mul) or int(loop.extent) != _VECTOR:
        return None
    casts = (added.a, added.b)
    if not ir.alike(*casts) or not isinstance(added.a, ir.tirx.Cast):
        return None
    load = added.a.value
    loaded = isinstance(load, ir.TensorLoad) and str(load.source.ty.dtype) in TYPES
    if not loaded or str(load.source.scope()) != "local":
        return None
    first = ir.tirx.IntImm(str(loop.loop_var.ty), 0)
    return _Squares(store.buffer, ir.substitute(load, {loop.loop_var: first}))


def _filled(registers: Any, value: Any) -> Any:
    """Statement: all registers have a value."""
    var = ir.Var("each", "int32")
    store = ir.BufferStore(registers, value, [var])
    return ir.For(var, 0, int(registers.ty.shape[0]), ir.ForKind.UNROLLED, store)


def _of_warp(own: Any, sum_of_lane: Any, update: Any, lane: Any, condition: Any) -> Any:
    """Add up what the lanes of a warp have in a register each; the first one stores the sum."""
    call = ir.cuda_func_call(
        "crossfuse_add_warp", sum_of_lane, source_code=_ADD_WARP, return_type="float32"
    )
    first = ir.tirx.EQ(lane, ir.tirx.IntImm("int32", 0))
    stored = ir.BufferStore(update.buffer, own[0], list(update.indices))
    whole = ir.SeqStmt([ir.BufferStore(own, call, [0]), ir.IfThenElse(first, stored, None)])
    return whole if condition is None else ir.IfThenElse(condition, whole, None)


def _role(loop: Any) -> str:
    return str(loop.annotations.get(WARP_PRODUCT, ""))
