"""The blocks of a stream as statements, and which loop of each goes through what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP_ROWS
from crossfuse.lower.hopper.program.tile import TileNest, tile_nest
from crossfuse.lower.hopper.recover.contraction import accumulates, factors, is_zero, same_indices
from crossfuse.lower.hopper.stream.program import Axis, Box
from crossfuse.lower.refusal import Rule
from crossfuse.lower.tree import bounds, implies, is_call

refuse_stream = Rule(
    "stream",
    instead="write the stream as docs/hopper.md shows it, or leave the annotation out for "
    "the general lowering",
)


@dataclass(frozen=True)
class Access:
    """One access of a statement."""

    buffer: Any
    #: Its first element in the tile.
    origin: tuple[Any, ...]
    #: For each dimension the variable of the loop that it follows, or None.
    loops: tuple[Any, ...]


@dataclass(frozen=True)
class Statement:
    """A block that stores one element for each iteration of its loops."""

    nest: TileNest

    @property
    def where(self) -> str:
        """How messages name it."""
        return self.nest.where

    @property
    def name(self) -> str:
        """Name of the block."""
        return str(self.nest.block.name_hint)

    @property
    def body(self) -> Any:
        """The store."""
        return self.nest.block.body

    @property
    def buffer(self) -> Any:
        """The buffer that it stores to."""
        return self.body.buffer

    @cached_property
    def target(self) -> Access:
        """Where it stores to."""
        return self.access(self.buffer, self.body.indices)

    @cached_property
    def loads(self) -> tuple[Access, ...]:
        """What it loads from buffers on the chip."""
        return tuple(
            self.access(each.source, each.indices)
            for each in self.loaded
            if not ir.is_global(each.source)
        )

    @property
    def loaded(self) -> tuple[Any, ...]:
        """All loads of its value."""
        return tuple(ir.buffer_loads(self.body.value))

    @property
    def accumulates(self) -> bool:
        """Whether it is a sum of products over loops that its target does not follow."""
        return accumulates(self.body) and len(factors(self.body)) == 2 and bool(self.reduced)

    @property
    def reduced(self) -> tuple[Any, ...]:
        """Variables of loops that its target does not follow."""
        kept = [each for each in self.target.loops if each is not None]
        variables = [each.loop_var for each in self.nest.loops if ir.constant(each.extent) != 1]
        return tuple(each for each in variables if not ir.among(each, kept))

    def factor(self, buffer: Any) -> Access | None:
        """The operand of a product that is a buffer; None if none is."""
        found = (each for each in factors(self.body) if each.source.same_as(buffer))
        load = next(found, None)
        return None if load is None else self.access(load.source, load.indices)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Buffers that a product multiplies."""
        return tuple(each.source for each in factors(self.body))

    def reduction(self) -> tuple[type, Any] | None:
        """The operation and the term of ``x = op(x, term)``; None for another store."""
        value = self.body.value
        for kind in (ir.tirx.Max, ir.tirx.Add):
            if not isinstance(value, kind):
                continue
            for old, term in ((value.a, value.b), (value.b, value.a)):
                loads = isinstance(old, ir.TensorLoad) and old.source.same_as(self.buffer)
                if loads and same_indices(old.indices, self.body.indices):
                    return kind, term
        return None

    def access(self, buffer: Any, indices: Any) -> Access:
        """Elements of a buffer at indices, by the loops of the nest."""
        found = [self.nest.along(buffer, each) for each in indices]
        loops = tuple(None if loop is None else loop.loop_var for _, loop in found)
        return Access(buffer, tuple(first for first, _ in found), loops)


def read_statements(parts: list[Any], around: tuple[Any, ...]) -> tuple[Statement, ...]:
    """Read nests of one block each, which stores one element.

    Refuses a nest that does more, or leaves elements of its tensor out.
    """
    statements = tuple(Statement(tile_nest(each, around)) for each in parts)
    for each in statements:
        if isinstance(each.body, ir.For):
            raise refuse_stream(
                each.where,
                "a list of a row's best elements",
                "the store of one element; lists take rows that one tile holds, at most 256 "
                "elements, of a product that nothing else is multiplied with",
                "select the best elements in a kernel of its own",
            )
        if not isinstance(each.body, ir.BufferStore):
            raise refuse_stream(each.where, "a body of another kind", "the store of one element")
        if not ir.is_global(each.buffer):
            each.nest.check_predicate(each.buffer)
    return statements


def only_store(after: tuple[Statement, ...]) -> Statement:
    """The store to global memory at the end, which must be the only one."""
    stores = [each for each in after if ir.is_global(each.buffer)]
    if len(stores) != 1 or stores[0] is not after[-1]:
        raise refuse_stream(
            "function", f"{len(stores)} stores behind the stream", "one store, at the end"
        )
    return stores[0]


class Roles:
    """Which axis each loop and each dimension of a buffer goes through.

    Products determine those of their operands; other statements follow, since they share buffers.
    `known` is an analyzer that knows the ranges of places and of the stream.
    """

    def __init__(self, known: Any) -> None:
        self.known = known
        #: By the variable of a loop.
        self.loops: dict[Any, Axis] = {}
        #: Of each dimension of a buffer, and where its tile begins.
        self.buffers: dict[Any, tuple[Axis | None, ...]] = {}
        self.origins: dict[Any, tuple[Any, ...]] = {}
        #: The tile that is the right operand of both products. The second one takes its first
        #: columns: what its dimension goes through is then the depth of the first one.
        self.both: Any = None

    def spread(self, statements: tuple[Statement, ...]) -> None:
        """Find the axes of all loops of statements.

        Refuses a statement that shares no buffer with the others, or takes another part of one.
        """
        left = list(statements)
        while left:
            now = [each for each in left if self._learn(each)]
            if not now:
                raise refuse_stream(
                    left[0].where,
                    f"a store to '{left[0].buffer.name}', by loops that no product tells apart",
                    "statements over rows and keys of a tile, or over rows and columns of the sums",
                )
            left = [each for each in left if each not in now]

    def _learn(self, statement: Statement) -> bool:
        """Whether all loops of a statement are known; then what it accesses is, too."""
        accesses = (statement.target, *statement.loads)
        for each in accesses:
            axes = self.buffers.get(each.buffer, ())
            for variable, axis in zip(each.loops, axes, strict=False):
                if variable is not None and axis is not None:
                    self.loops.setdefault(variable, axis)
        moving = [each for access in accesses for each in access.loops if each is not None]
        if any(each not in self.loops for each in moving):
            return False
        for each in accesses:
            if not ir.is_global(each.buffer):
                self._place(statement, each)
        return True

    def _place(self, statement: Statement, access: Access) -> None:
        """Refuse a statement that accesses another part of a buffer than others do."""
        axes = tuple(None if each is None else self.loops[each] for each in access.loops)
        if access.buffer.same_as(self.both):
            axes = tuple(Axis.DEPTH if each is Axis.COLUMN else each for each in axes)
        self.buffers.setdefault(access.buffer, axes)
        self.origins.setdefault(access.buffer, access.origin)
        origin = self.origins[access.buffer]
        same = all(
            self.known.can_prove_equal(a, b) for a, b in zip(access.origin, origin, strict=True)
        )
        if axes != self.buffers[access.buffer] or not same:
            raise refuse_stream(
                f"{statement.where}, buffer '{access.buffer.name}'",
                f"another part of it, from {list(access.origin)}",
                f"the tile that others take, from {list(origin)}",
            )


# Tiles of tensors in global memory: what a stream loads and stores.


def read_load(statement: Statement, roles: Roles, axis: Axis, stored: int) -> Box:
    """Read the load of a tile whose rows go along an axis; `stored` rows of a tile are stored.

    Refuses anything but a copy of whole rows of a tensor.
    """
    load = copied(
        statement, lambda each: axis is Axis.ROW and _has_rows(statement, each, roles, stored)
    )
    access = statement.access(load.source, load.indices)
    if _order(access, roles) != _order(statement.target, roles):
        raise refuse_stream(
            statement.where, "a tile that is transposed as it is loaded", "a copy of a box"
        )
    return _box(statement, access, roles, axis)


def read_output(statement: Statement, roles: Roles, columns: int = 0, whole: int = 0) -> Box:
    """Read the box that a store writes: all columns, or so many of a CTA's slice.

    Or, of a matrix, some columns of its rows; they are `whole` if each CTA stores a slice of them.
    """
    nest, width = statement.nest, _width(statement, whole)
    box = _box(statement, statement.target, roles, Axis.ROW, columns or width)
    rows, loop = box.rows, statement.target.loops[box.axis]
    for term in _conditions(statement) if width else nest.further_conditions():
        found = _limit(nest.placed(term), loop, statement)
        beyond = bool(width) and _keeps_inside(statement, term)
        # Of a tile of one warpgroup fewer rows are passed on; others store what lies beyond, too.
        if found is not None and not (beyond and box.rows > WARPGROUP_ROWS):
            rows = min(rows, found)
        elif not beyond:
            nest.check_predicate(box.buffer)
            raise refuse_stream(
                f"{statement.where}, buffer '{box.buffer.name}'",
                f"rows of a matrix while {term}",
                "conditions that keep indices within the matrix, or leave out as many rows of "
                "each tile",
                "take sequences whose queries are a multiple of the tile's rows",
            )
    return replace(box, rows=rows, width=width)


def _width(statement: Statement, whole: int) -> int:
    """Columns that are stored of the rows of a matrix; 0 of whole rows."""
    target, nest = statement.target, statement.nest
    extents = {each.loop_var: int(each.extent) for each in nest.loops}
    width, end = whole or extents.get(target.loops[-1], 1), int(target.buffer.ty.shape[-1])
    return width if len(target.loops) == 2 and width < end else 0


def _conditions(statement: Statement) -> list[Any]:
    """Conditions of a store."""
    terms = ir.terms(statement.nest.realize.predicate)
    return [each for each in terms if ir.constant(each) != 1]


def _keeps_inside(statement: Statement, term: Any) -> bool:
    """Whether a condition leaves out nothing but what lies beyond the tensor that is stored to.

    Rows of several sequences may lie one below the other: those beyond one are another's.
    """
    nest = statement.nest
    loops = bounds((*nest.around, *nest.loops))
    shape = statement.buffer.ty.shape
    inside = (nest.placed(at) < end for at, end in zip(statement.body.indices, shape, strict=True))
    return any(implies(each, nest.placed(term), loops) for each in inside)


def _limit(term: Any, loop: Any, statement: Statement) -> int | None:
    """The number of rows for which a condition holds, the first ones; None for any other."""
    if not isinstance(term, ir.tirx.LT):
        return None
    return ir.constant(statement.nest.known.simplify(term.b - term.a + loop))


def _order(access: Access, roles: Roles) -> list[Axis | None]:
    return [roles.loops.get(each) for each in access.loops if each is not None]


def _box(statement: Statement, access: Access, roles: Roles, axis: Axis, columns: int = 0) -> Box:
    *outer, last = access.loops
    down = [number for number, each in enumerate(outer) if each is not None]
    extents = {each.loop_var: int(each.extent) for each in statement.nest.loops}
    shape = [int(each) for each in access.buffer.ty.shape]
    whole = (1 if last is None else extents[last]) == (columns or shape[-1])
    if len(down) != 1 or roles.loops.get(outer[down[0]]) is not axis or not whole:
        raise refuse_stream(
            f"{statement.where}, buffer '{access.buffer.name}'",
            f"a box of {len(down) + 1} dimensions, {extents.get(last)} of {shape[-1]} columns",
            f"{axis.value} with all their columns, which are the last dimension",
        )
    return Box(access.buffer, access.origin, down[0], extents[outer[down[0]]])


def copied(statement: Statement, harmless: Callable[[Any], bool] = lambda _: False) -> Any:
    """The load of a copy, which may be zero beyond its tensor, or by harmless conditions."""
    value = statement.body.value
    if not isinstance(value, ir.TensorLoad):
        condition, chosen, other = branches_of(value)
        if isinstance(chosen, ir.TensorLoad) and is_zero(_plain(other)):
            beyond = _beyond(statement, condition, chosen)
            rest = [each for each in beyond if not harmless(each)]
            if rest:
                raise refuse_stream(
                    statement.where, f"zeros unless {rest[0]}", "zeros beyond the tensor alone"
                )
            value = chosen
    if not isinstance(value, ir.TensorLoad) or not ir.is_global(value.source):
        raise refuse_stream(
            statement.where,
            f"a tile in shared memory of {statement.body.value}",
            "a copy of a parameter, zero beyond it",
        )
    return value


def branches_of(value: Any) -> tuple[Any, Any, Any]:
    """Condition and both values of a choice; None three times for another expression."""
    if isinstance(value, ir.tirx.Select):
        return value.condition, value.true_value, value.false_value
    if is_call(value, ir.IF_THEN_ELSE):
        return tuple(value.args)
    return None, None, None


def _plain(value: Any) -> Any:
    """A constant without a cast."""
    if isinstance(value, ir.tirx.Cast):
        value = value.value
    if isinstance(value, ir.tirx.IntImm):
        return ir.tirx.FloatImm("float32", float(value.value))
    return value


def _beyond(statement: Statement, condition: Any, load: Any) -> list[Any]:
    """Terms of a condition that do not hold everywhere in the tensor."""
    nest = statement.nest
    loops = bounds((*nest.around, *nest.loops))
    inside = [
        nest.placed(index) < extent
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True)
    ]
    terms = map(nest.placed, ir.terms(condition))
    return [each for each in terms if not any(implies(known, each, loops) for known in inside)]


def _has_rows(statement: Statement, term: Any, roles: Roles, stored: int) -> bool:
    """Whether a condition leaves out rows that are not stored: what they hold does not matter."""
    (loop,) = (
        each.loop_var
        for each in statement.nest.loops
        if roles.loops.get(each.loop_var) is Axis.ROW and ir.constant(each.extent) != 1
    )
    limit = _limit(term, loop, statement)
    return limit is not None and limit >= stored
