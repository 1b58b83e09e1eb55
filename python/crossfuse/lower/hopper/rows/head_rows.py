"""Rows that a warpgroup of its own makes, while others multiply raw ones.

First those of its CTA, then, if the rows of its tile are late, all of these: see `helping`. A
thread of each row stores its factor, by which sums of raw rows are multiplied.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.rows.emit import after_kernel_before, first_row
from crossfuse.lower.hopper.rows.row_loop import RowLoop
from crossfuse.lower.hopper.rows.statement_copies import flat, fresh, independent_of
from crossfuse.lower.hopper.rows.warpgroup import passed_on, staged
from crossfuse.lower.hopper.statements import Variable, let, when
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.flags import FlagWriter
from crossfuse.lower.hopper.timeline import ROWS_BEGUN, ROWS_MADE
from crossfuse.lower.hopper.warmup import hidden


class HeadRows:
    """The warpgroup that makes rows.

    Parameters
    ----------
    body : Body
        Of a kernel with a head.
    """

    def __init__(self, body: Body) -> None:
        plan, flags = body.plan, body.plan.phases[0].awaits
        assert plan.head is not None and plan.rows is not None and body.help is not None
        assert flags is not None
        self.body, self.head, self.rows = body, plan.head, plan.rows
        self.flags, self.help = flags, body.help

    def emit(self) -> None:
        """Write it."""
        body, where = self.body, self.body.where
        ctas = body.plan.clusters * body.plan.cluster_size
        own = first_row(body.plan, where, self.rows, 0)
        first, self._thread = after_kernel_before(body.plan, row_then=own, lane_then=where.thread)
        body.timeline.stamp_rows(ROWS_BEGUN)
        loop = RowLoop(body, self.flags, first, ctas, self.head.at_once)
        late = Variable("rows_are_late", "int32", 0)
        with ir.script.serial(0, hidden(ir.script.int32(2))) as turn:
            ir.IRBuilder.name("turn", turn)
            helps = hidden(turn)
            with when(helps > 0):
                late.set(self.help.await_rows())
                loop.turn_to_late(late, 0, 1)
            with loop.each() as row:
                self._make(row, loop.step)
                counted = let("row_counted", row + where.thread * loop.step)
                with when(ir.script.And(where.thread < self.head.at_once, helps == 0)):
                    self._count(loop.writer, counted)
            with when(helps == 0):
                if body.plan.cluster_size > 1:
                    mbarrier.await_started()  # who loads has set barriers up
                # Not who raises flags: their releases take a while.
                with when(where.thread == WARPGROUP - 1):
                    mbarrier.arrive(body.own_made)
                body.timeline.stamp_rows(ROWS_MADE)
        with when(ir.script.And(where.thread == 0, late.value > 0)):
            self.help.say_done()
        if body.plan.cluster_size > 1:
            mbarrier.leave_cluster()

    def _count(self, writer: FlagWriter, row: Any) -> None:
        """Count a row at its flag; those that the last tile does not have too."""
        with when(row < self.flags.down * self.flags.rows):
            writer.raise_flag(ir.script.min(row, self.rows.rows - 1), 0)

    def _make(self, first: Any, pitch: Any) -> None:
        """Make rows side by side: of those that there are not, the last one again."""
        number = self.body.where.warpgroup - 1
        with when(first < self.rows.rows):
            for statement in self._side_by_side(first, pitch, number):
                ir.script.add_to_parent(statement)
        # All threads have stored their elements, and read one another's states.
        mbarrier.meet_warpgroup(number)

    def _side_by_side(self, first: Any, pitch: Any, number: Any) -> list[Any]:
        """Statements of several rows, one of each at a time; what all of them load, once.

        And first, though it is needed last: ptxas keeps the order of loads, see `loads_first`, but
        would put the last of them behind the merge of states.
        """
        rows, thread = self.rows, let("own_thread", self._thread)
        statements = [*flat(rows.statement), self._kept()]
        same = independent_of(rows.row, statements)
        made = []
        for each in range(self.head.at_once):
            row = let("own_row", ir.script.min(first + each * pitch, rows.rows - 1))
            place = staged(self.body, rows, each)
            copies = statements if each == 0 else fresh(statements, same)
            own = partial(_given, {rows.row: row, rows.lane: thread})
            made.append([passed_on(own(copy), place, number) for copy in copies])
        shared: list[Any] = []
        others: list[Any] = []
        for statement, together in zip(statements, zip(*made, strict=True), strict=True):
            once = _is_of(statement, same)
            (shared if once else others).extend(together[:1] if once else together)
        return [*shared, *others]

    def _kept(self) -> Any:
        """The statement that stores a row's factor."""
        rows = self.rows
        assert rows.scaled is not None
        store = ir.BufferStore(self.body.factors, rows.scaled.factor, [rows.row])
        return ir.IfThenElse(rows.lane == 0, store, None)


def _given(values: dict[Any, Any], statement: Any) -> Any:
    return ir.substitute(statement, lambda var: values.get(var, var))


def _is_of(statement: Any, same: dict[Any, Any]) -> bool:
    """Whether a statement fills or allocates registers that all rows have."""
    if isinstance(statement, ir.AllocBuffer):
        return statement.buffer in same
    return any(statement.same_as(each) for each in same.values())
