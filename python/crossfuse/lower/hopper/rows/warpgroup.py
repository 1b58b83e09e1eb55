"""Rows that multiplying warpgroups make, a row each, before the first left tile can have come.

They have nothing else to do then. For 128 threads a row is short: all of it is asked for at once
and kept in registers. Of its state the warps pass one another theirs, through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.rows.emit import after_kernel_before, first_row
from crossfuse.lower.hopper.rows.program import RowProgram, size_of
from crossfuse.lower.hopper.rows.row_loop import RowLoop
from crossfuse.lower.hopper.statements import Variable, branches, let, when
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.flags import Flags, FlagWriter
from crossfuse.lower.hopper.timeline import ROWS_BEGUN, ROWS_MADE
from crossfuse.lower.hopper.warmup import Warmup, hidden


def meet_and_make_rows(body: Body) -> None:
    """Write where a cluster's threads meet first, and the rows that warpgroups make.

    In a cluster these say that they have started, make rows, and then wait for the others: nobody
    waits for them, and what they load is on its way before weights are asked for.

    Parameters
    ----------
    body : Body
        Of the kernel.
    """
    plan, flags = body.plan, body.plan.phases[0].awaits
    rows = plan.rows if plan.rows is not None and plan.rows.by_warpgroups else None
    if rows is None or flags is None:
        mbarrier.meet_started(plan.cluster_size)
        return
    if plan.cluster_size == 1:
        mbarrier.meet_started(1)
    else:
        mbarrier.say_started()
    with when(body.where.warpgroup > 0):
        _emit(body, rows, flags)
    if plan.cluster_size > 1:
        mbarrier.await_started()


class RowsWithHelp:
    """Rows that a warpgroup makes twice: its own, and if others are late, those of its tile.

    One loop makes either, in the warm-up and after it: so there is one copy of its statements, and
    the code of the first products is warmed up while the rows of others are on their way.

    Parameters
    ----------
    body : Body
        Of a kernel with help.
    rows : RowProgram
        What to make.
    flags : Flags
        Of the tiles that a product loads.
    """

    def __init__(self, body: Body, rows: RowProgram, flags: Flags) -> None:
        self.body, self.rows = body, rows
        plan, where = body.plan, body.where
        first, self._thread = after_kernel_before(
            plan, row_then=first_row(plan, where, rows), lane_then=where.thread
        )
        body.timeline.stamp_rows(ROWS_BEGUN)
        step = plan.consumers * plan.clusters * plan.cluster_size
        self._loop = RowLoop(body, flags, first, step)

    def make(self, warmup: Warmup) -> None:
        """Make rows: in the warm-up its own, then those that are late."""
        body, help_ = self.body, self.body.help
        assert help_ is not None
        counts = hidden(warmup.turn)
        late = Variable("rows_are_late", "int32", 0)
        with when(counts > 0):
            late.set(help_.await_tile(body.left.full(0)))
            self._loop.turn_to_late(late, body.where.warpgroup - 1, body.plan.consumers)
        with self._loop.each() as row:
            _make(body, self.rows, row, self._thread)
            with when(ir.script.And(body.where.thread == 0, counts == 0)):
                self._loop.writer.raise_flag(ir.script.min(row, self.rows.rows - 1), 0)
        with branches(counts > 0) as (helped, made):
            with helped, when(ir.script.And(body.where.thread == 0, late.value > 0)):
                help_.say_done()
            with made:
                body.timeline.stamp_rows(ROWS_MADE)
                if body.plan.cluster_size > 1:
                    mbarrier.await_started()
                body.timeline.stamp("cluster met")


def _emit(body: Body, rows: RowProgram, flags: Flags) -> None:
    """Each warpgroup makes rows; rows that the last tile does not have are counted, too."""
    plan, where = body.plan, body.where
    first, thread = after_kernel_before(
        plan, row_then=first_row(plan, where, rows), lane_then=where.thread
    )
    body.timeline.stamp_rows(ROWS_BEGUN)
    row = Variable("row", "int32", first)
    writer = FlagWriter(body.placed(flags))
    with ir.script.While(row.value < flags.down * flags.rows):
        _make(body, rows, row.value, thread)
        with when(where.thread == 0):
            writer.raise_flag(ir.script.min(row.value, rows.rows - 1), 0)
        row.set(row.value + plan.consumers * plan.clusters * plan.cluster_size)
    body.timeline.stamp_rows(ROWS_MADE)


def _make(body: Body, rows: RowProgram, row: Any, thread: Any) -> None:
    """A warpgroup makes a row, if there is one of that number, and meets behind its stores."""
    number = body.where.warpgroup - 1
    with when(row < rows.rows):
        made = rows.of(let("own_row", row), let("own_thread", thread))
        ir.script.add_to_parent(passed_on(made, staged(body, rows, number), number))
    # All threads have stored their elements, and read one another's states.
    mbarrier.meet_warpgroup(number)


@dataclass(frozen=True, eq=False)
class Staged:
    """A buffer that warps pass one another, and where it is: elements of the arena from one on."""

    buffer: Any
    elements: Any
    first: Any

    def place(self, indices: Any) -> Any:
        """Of an element."""
        place: Any = 0
        for extent, each in zip(self.buffer.ty.shape, indices, strict=True):
            place = place * int(extent) + each
        return self.first + place


def staged(body: Body, rows: RowProgram, number: Any) -> list[Staged]:
    """Where the warps of a row pass one another states: row `number` of those under way."""
    found: list[Staged] = []
    place = number * rows.state_places
    for each in rows.staged:
        found.append(Staged(each, body.elements("row_states", str(each.ty.dtype)), place))
        place = place + size_of(each)
    return found


def passed_on(made: Any, staged: list[Staged], warpgroup: Any) -> Any:
    """Statements with what is passed on in the arena; a warpgroup meets behind what stores it."""
    barrier = ir.script.Cast("uint32", 1 + warpgroup)
    meeting = ir.tirx.Evaluate(ir.script.ptx.bar.sync(barrier, ir.script.uint32(WARPGROUP)))

    def find(buffer: Any) -> Staged | None:
        return next((each for each in staged if each.buffer.same_as(buffer)), None)

    def load(node: Any, mutator: Any) -> Any:
        node, found = mutator.default_mutate(node), find(node.source)
        return node if found is None else found.elements[found.place(node.indices)]

    def store(node: Any, mutator: Any) -> Any:
        node, found = mutator.default_mutate(node), find(node.buffer)
        if found is None:
            return node
        return ir.BufferStore(found.elements, node.value, [found.place(node.indices)])

    def share(node: Any, mutator: Any) -> Any:
        stores: list[Any] = []
        ir.walk(node, (ir.BufferStore, stores.append))
        node = mutator.default_mutate(node)
        return ir.SeqStmt([node, meeting]) if any(find(e.buffer) for e in stores) else node

    def declare(node: Any, mutator: Any) -> Any:
        return node if find(node.buffer) is None else ir.tirx.Evaluate(0)

    return ir.mutate(
        made,
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.IfThenElse, share),
        (ir.AllocBuffer, declare),
    )
