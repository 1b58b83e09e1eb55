"""Integer expressions that go up evenly along the rows and the keys of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.stream.program.parts import Framed


@dataclass(frozen=True)
class Affine:
    """An integer expression in the row and the key of an element.

    Attributes
    ----------
    value : Any
        The expression.
    row, key : int
        What it grows by from one row, and from one key, to the next.
    """

    value: Any
    row: int
    key: int


def affine(value: Any, program: Framed) -> Affine | None:
    """Read an integer expression; None if it does not grow evenly."""
    if not str(value.ty).startswith("int"):
        return None
    known = ranges(program)
    steps = []
    for var in (program.row, program.key):
        moved = ir.substitute(value, partial(_one_on, var))
        steps.append(ir.constant(known.simplify(moved - value)))
    row, key = steps
    return None if row is None or key is None else Affine(value, row, key)


def _one_on(var: Any, other: Any) -> Any:
    return other + 1 if other.same_as(var) else other


def inequality(condition: Any, program: Framed) -> Affine | None:
    """An expression that is at least zero where a condition holds; None if there is no such."""
    pairs = {
        ir.tirx.LT: lambda a, b: b - a - 1,
        ir.tirx.LE: lambda a, b: b - a,
        ir.tirx.GT: lambda a, b: a - b - 1,
        ir.tirx.GE: lambda a, b: a - b,
    }
    difference = pairs.get(type(condition))
    if difference is None or not str(condition.a.ty).startswith("int"):
        return None
    return affine(ranges(program).simplify(difference(condition.a, condition.b)), program)


def ranges(program: Framed) -> Any:
    """An analyzer that knows the ranges of places, of the stream, and within a tile."""
    known = ir.sym.Analyzer()
    for var, start, extent in program.domains:
        kind = str(var.ty)
        both = (ir.tirx.IntImm(kind, each) for each in (start, extent))
        known.bind(var, ir.tvm.ir.Range.from_min_extent(*both))
    return known
