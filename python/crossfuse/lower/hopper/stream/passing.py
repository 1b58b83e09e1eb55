"""Weights and values of rows pass from one warpgroup to others, by shared memory and two barriers.

One named barrier (PTX ISA, bar) tells those who add that weights are there, the other one tells who
scores that they have been read.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARPGROUP
from crossfuse.lower.hopper.multiply.matrices import scatter
from crossfuse.lower.hopper.plan.kept import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import registers, run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.plan.passed import BOX, BOX_KEYS
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Named barriers behind those of meetings: weights are there, and they have been read.
_THERE, _READ = 8, 9


class Passing:
    """Weights and values of rows in shared memory, between both roles.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    """

    def __init__(self, body: StreamBody) -> None:
        plan = body.plan
        assert plan.passed is not None
        self.body, self.passed = body, plan.passed
        self._threads = ir.script.uint32(WARPGROUP * (1 + plan.adders))
        self._rows = ir.script.decl_buffer(
            (max(1, len(self._buffers)) * WARPGROUP_ROWS,),
            "float32",
            data=body.memory.data,
            scope="shared.dyn",
            byte_offset=plan.arena["passed"].offset + self.passed.of_rows,
        )
        ir.IRBuilder.name("passed_rows", self._rows)

    @property
    def _buffers(self) -> tuple[Any, ...]:
        return (*self.passed.carried, *self.passed.finished)

    def await_read(self) -> None:
        """Who scores waits until what it handed over before has been read."""
        run(ir.script.ptx.bar.sync(ir.script.uint32(_READ), self._threads))

    def hand_over(self) -> None:
        """Who scores says that weights are there, also for wgmma."""
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        run(ir.script.ptx.bar.arrive(ir.script.uint32(_THERE), self._threads))

    def say_read(self) -> None:
        """Who adds says that it has read everything, or begins."""
        run(ir.script.ptx.bar.arrive(ir.script.uint32(_READ), self._threads))

    def await_there(self) -> None:
        """Who adds waits for weights."""
        run(ir.script.ptx.bar.sync(ir.script.uint32(_THERE), self._threads))

    def put_weights(self, words: Any) -> None:
        """Store the weights of a tile, as wgmma takes a left operand from shared memory."""
        region = self.body.region("passed")
        for part in range(self.body.plan.program.tile[1] // GROUP):
            box, column = divmod(part * GROUP, BOX_KEYS)

            def address(inside: Any, box: int = box) -> Any:
                return region(box * BOX + inside)

            first = part * GROUP_REGISTERS
            matrices = [words[first + each] for each in range(GROUP_REGISTERS)]
            scatter(self.body.where, matrices, ROW_BYTES, column, address)

    def put_rows(self, rows: RowState, lanes: Lanes, buffers: tuple[Any, ...]) -> None:
        """Store values of rows; one of the four threads of a row does."""
        with when(self.body.where.lane % 4 == 0):
            for buffer in buffers:
                for half in range(2):
                    value = rows.register(buffer, half)
                    ir.script.buffer_store(self._rows, value, [self._place(buffer, lanes, half)])

    def take_rows(self, lanes: Lanes, buffers: tuple[Any, ...]) -> dict[Any, Any]:
        """Load values of rows into registers."""
        found = {}
        for buffer in buffers:
            found[buffer] = registers(str(buffer.name), 2, "float32")
            for half in range(2):
                value = self._rows[self._place(buffer, lanes, half)]
                ir.script.buffer_store(found[buffer], value, [half])
        return found

    def _place(self, buffer: Any, lanes: Lanes, half: int) -> Any:
        number = next(n for n, each in enumerate(self._buffers) if each.same_as(buffer))
        return number * WARPGROUP_ROWS + lanes.rows[half]
