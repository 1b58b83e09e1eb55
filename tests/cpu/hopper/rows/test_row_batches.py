"""Statements of a row, sorted so that those of several rows can be written side by side."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused
from crossfuse.lower.hopper.rows.statements import RowStatements, without_stores

pytestmark = pytest.mark.cpu

ROW, LANE = ir.Var("row", "int32"), ir.Var("lane", "int32")
X = ir.tirx.decl_buffer((4, 256), "float32", "x", layout=None)
OUT = ir.tirx.decl_buffer((4,), "float32", "out", layout=None)


def registers(name: str, extent: int = 8) -> Any:
    return ir.tirx.decl_buffer((extent,), "float32", name, scope="local", layout=None)


def copied(to: Any, first: int = 0) -> Any:
    """``for i: to[i] = x[row, first + lane * 8 + i]``."""
    i = ir.Var("i", "int32")
    store = ir.BufferStore(to, X[ROW, first + LANE * 8 + i], [i])
    return ir.For(i, 0, 8, ir.ForKind.UNROLLED, store)


def sequence(other: int) -> tuple[Any, Any, Any]:
    """Elements that are copied twice, `other` further on the second time, and read from both."""
    one, two, sums = registers("one"), registers("two"), registers("sums", 1)
    whole = ir.SeqStmt(
        [
            *(ir.AllocBuffer(each) for each in (one, sums, two)),
            copied(one),
            ir.BufferStore(sums, one[0], [0]),
            copied(two, other),
            ir.BufferStore(sums, sums[0] + two[1], [0]),
        ]
    )
    return whole, one, two


def test_elements_that_are_copied_twice_are_copied_once() -> None:
    whole, one, _ = sequence(0)
    found = RowStatements.of(whole, X)
    assert len(found.loads) == 3  # two allocations
    assert {each.source for each in ir.buffer_loads(*found.rest)} == {one, found.rest[0].buffer}


def test_other_elements_are_copied_too() -> None:
    whole, _, two = sequence(8)
    found = RowStatements.of(whole, X)
    assert len(found.loads) == 5
    assert two in {each.source for each in ir.buffer_loads(*found.rest)}


def test_elements_that_are_loaded_where_they_are_used() -> None:
    sums = registers("sums", 1)
    whole = ir.SeqStmt([ir.AllocBuffer(sums), ir.BufferStore(sums, X[ROW, LANE] + 1.0, [0])])
    with pytest.raises(LoweringRefused) as caught:
        RowStatements.of(whole, X)
    assert str(caught.value) == (
        "rows: tensor 'x': found a load of 'x[row, lane]' where it is used; limit: loops that copy "
        "elements to registers, and do nothing else. Instead: schedule as schedule_rows_gemm does, "
        "or make whole rows: leave the chunk out."
    )


def test_a_number_of_one_thread_is_stored_where_it_stands() -> None:
    """What lane 0 alone has, no lane can store for another row."""
    held = registers("held")
    store = ir.tirx.IfThenElse(LANE.equal(0), ir.BufferStore(OUT, held[3], [ROW]), None)
    whole, stores = without_stores(store, LANE, 4)
    assert not stores and whole.same_as(store)
