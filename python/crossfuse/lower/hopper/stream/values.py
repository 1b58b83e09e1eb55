"""Expressions of a stream in the registers of one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.statements import let
from crossfuse.lower.hopper.stream.program.affine import affine, ranges
from crossfuse.lower.hopper.stream.program.parts import Framed
from crossfuse.lower.hopper.stream.recover.settle import reads
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS

#: Integers below this are float32 numbers, and so are their sums.
_EXACT = 1 << 24


@dataclass(frozen=True)
class Lanes:
    """Where a thread's registers of a tile are.

    Register ``4 j + 2 h + q`` is that of row (lane / 4 + 8 h) of the warp's 16, in column
    (8 j + 2 (lane % 4) + q). PTX ISA, wgmma, register fragments for D.

    Attributes
    ----------
    rows : tuple
        Rows in the tile of both halves.
    column : Any
        Column of the first register.
    base : Any
        First row of the warpgroup.
    """

    rows: tuple[Any, Any]
    column: Any
    base: Any

    @staticmethod
    def of(where: Coordinates, warpgroup: Any) -> Lanes:
        """Those of a thread."""
        base = let("first_row", warpgroup * WARPGROUP_ROWS)
        row = base + (where.warp * WARP_ROWS + where.lane // 4)
        column = let("lane_column", where.lane % 4 * 2)
        return Lanes((let("row", row), let("row_below", row + 8)), column, base)


def half_of(register: int) -> int:
    """Which of a thread's two rows a register belongs to."""
    return register // 2 % 2


def column_of(register: int) -> int:
    """Column of a register, counted from the thread's first."""
    return register // 4 * 8 + register % 2


@dataclass
class Values:
    """Expressions of a tile that a thread is at.

    Attributes
    ----------
    program : Framed
        What they are of.
    lanes : Lanes
        Where its registers are.
    places : dict
        Values of places and of the stream's variable.
    rows : Callable
        Function from a buffer of rows and a half to the register; None for another buffer.
    elements : Callable
        The same of buffers of elements, by register.
    """

    program: Framed
    lanes: Lanes
    places: dict[Any, Any]
    rows: Callable[[Any, int], Any]
    elements: Callable[[Any, int], Any]
    _floats: dict[tuple[int, str], Any] = field(default_factory=dict)
    _named: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def with_rows_named(self, value: Any) -> Any:
        """The same expression with what is made of rows alone made once, and named.

        The compiler does not join divisions.
        """

        def name(part: Any) -> Any:
            var = ir.tirx.Var("of_row", str(part.ty))
            halves = [let("of_row", self.of_row(part, half)) for half in range(2)]
            self._named[var] = (halves[0], halves[1])
            return var

        return _replace_row_parts(value, self.program, name)

    def of_row(self, value: Any, half: int) -> Any:
        """An expression of a row."""
        return self._translate(value, half, 2 * half, {self.program.row: self.lanes.rows[half]})

    def of_column(self, value: Any, half: int, column: Any) -> Any:
        """An expression of a row and a column of the output."""
        known = {self.program.row: self.lanes.rows[half], self.program.column: column}
        return self._translate(value, half, 2 * half, known)

    def of_element(self, value: Any, register: int) -> Any:
        """An expression of an element."""
        half = half_of(register)
        column = self.lanes.column + column_of(register)
        known = {
            self.program.row: self.lanes.rows[half],
            self.program.key: column,
            self.program.column: column,
        }
        return self._translate(self._with_floats(value, register), half, register, known)

    def placed(self, value: Any, row: Any, key: Any) -> Any:
        """An integer expression at a row and a key."""
        known = self.places | {self.program.row: row, self.program.key: key}
        moved = ir.substitute(value, lambda var: known.get(var, var))
        return ir.sym.Analyzer().simplify(moved)

    def _translate(self, value: Any, half: int, register: int, known: dict[Any, Any]) -> Any:
        named = {var: both[half] for var, both in self._named.items()}
        known = self.places | named | known

        def load(node: Any, mutator: Any) -> Any:
            if str(node.source.scope()) == "global":
                return self._from_memory(mutator.default_mutate(node))
            row = self.rows(node.source, half)
            return self.elements(node.source, register) if row is None else row

        value = ir.mutate(value, (ir.TensorLoad, load))
        return ir.substitute(value, lambda var: known.get(var, var))

    def _from_memory(self, load: Any) -> Any:
        """A load of a parameter; beyond it, where nothing counts, of its last element."""
        bounded = ranges(self.program)
        indices = []
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            inside = bounded.can_prove(index < extent)
            indices.append(index if inside else ir.script.min(index, extent - 1))
        return load.source[tuple(indices)]

    def _with_floats(self, value: Any, register: int) -> Any:
        """Positions as numbers: converted once for each row, and counted on from there."""

        def cast(node: Any, mutator: Any) -> Any:
            found = affine(node.value, self.program) if str(node.ty) == "float32" else None
            if found is None or not found.key or not self._is_exact(node.value):
                return mutator.default_mutate(node)
            half = half_of(register)
            name = (half, str(node))
            if name not in self._floats:
                first = self.placed(node.value, self.lanes.rows[half], self.lanes.column)
                self._floats[name] = let("position", first.astype("float32"))
            step = found.key * column_of(register)
            return self._floats[name] + ir.script.float32(float(step))

        return ir.mutate(value, (ir.tirx.Cast, cast))

    def _is_exact(self, value: Any) -> bool:
        bound = ranges(self.program).const_int_bound(value)
        return bound.min_value > -_EXACT and bound.max_value < _EXACT


def _replace_row_parts(value: Any, program: Framed, name: Callable[[Any], Any]) -> Any:
    """Replace the largest calls, choices and quotients that are the same in a whole row."""

    def is_of_row(node: Any) -> bool:
        moving = any(
            each.same_as(var)
            for each in ir.variables(node)
            for var in (program.key, program.column)
        )
        return not moving and not any(reads(node, each) for each in program.elements)

    def visit(node: Any, mutator: Any) -> Any:
        return name(node) if is_of_row(node) else mutator.default_mutate(node)

    kinds = (ir.Call, ir.tirx.Select, ir.tirx.Div)
    return ir.mutate(value, *((kind, visit) for kind in kinds))
