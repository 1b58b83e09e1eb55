"""Results of a tile of rows leave registers: boxes in shared memory, stored by TMA."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.multiply.matrices import scatter
from crossfuse.lower.hopper.plan.store import PACKED_TYPES
from crossfuse.lower.hopper.statements import registers, run, when
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.producer import coordinates
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Lanes, Values
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.tma import store_name
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS

#: Columns of four matrices of 8 x 8, two of them one below the other.
_SPAN = 16


class ResultStore:
    """The results of one warpgroup.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    warpgroup : Any
        Index of the multiplying warpgroup.
    lanes : Lanes
        Where its registers are.
    sums : Any
        Registers of the second product.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, lanes: Lanes, sums: Any) -> None:
        self.body = body
        self.plan = body.plan
        self.warpgroup = warpgroup
        self.lanes = lanes
        self.sums = sums
        self.packed = registers("packed", _SPAN // 4, "uint32")

    def store(self, rows: RowState, places: dict[Any, Any]) -> None:
        """Store what the sums and the state of rows make, of the tile at some places."""
        program = self.plan.program
        values = Values(program, self.lanes, places, rows.register, self._sum)
        for buffer in self.plan.registers.deferred:
            rows.gather(buffer)
        for step in program.after:
            rows.run(step, values)
        self._open()
        self.leave(values, places)

    def leave(self, values: Values, places: dict[Any, Any]) -> None:
        """Store results, for which there is room."""
        self._fill(values)
        run(ir.script.ptx.fence.proxy.async_.shared__cta())
        mbarrier.meet_warpgroup(self.warpgroup)
        with when(self.body.where.thread == 0):
            self._copy(places)

    def finish(self) -> None:
        """Wait until all boxes have left shared memory."""
        with when(self.body.where.thread == 0):
            run(ir.script.ptx.cp.async_.bulk.wait_group.read(0))

    def _sum(self, buffer: Any, register: int) -> Any:
        assert buffer.same_as(self.plan.program.sums), buffer
        return self.sums[register]

    def _open(self) -> None:
        """Boxes of the tile before have left."""
        with when(self.body.where.thread == 0):
            run(ir.script.ptx.cp.async_.bulk.wait_group.read(0))
        mbarrier.meet_warpgroup(self.warpgroup)

    def _fill(self, values: Values) -> None:
        program = self.plan.program
        value = program.result
        if isinstance(value, ir.tirx.Cast) and str(value.value.ty) == "float32":
            value = value.value
        value = values.with_rows_named(value)
        convert = getattr(ir.script.ptx.cvt.rn, PACKED_TYPES[program.output.dtype]).f32
        for first in range(0, self.plan.columns, _SPAN):
            for number in range(_SPAN // 4):
                register = first // 2 + 2 * number
                low, high = (values.of_element(value, register + each) for each in range(2))
                run(convert(self.packed[number], high, low))
            box, column = divmod(first, self.plan.output.map.box[0])

            def address(inside: Any, box: int = box) -> Any:
                return self._address(box, inside)

            scatter(
                self.body.where,
                [self.packed[each] for each in range(_SPAN // 4)],
                self.plan.output.map.swizzle,
                column,
                address,
            )

    def _address(self, box: int, inside: Any = 0) -> Any:
        output = self.plan.output
        offset = self.warpgroup * output.size + (box * output.pitch + inside)
        return self.body.region("boxes")(offset)

    def _corner(self) -> tuple[Any, Any]:
        """First row and column in the tile."""
        return self.warpgroup * WARPGROUP_ROWS, 0

    @property
    def _boxes(self) -> int:
        """Boxes of the warpgroup."""
        return self.plan.output.copies // max(1, self.plan.adders)

    def _copy(self, places: dict[Any, Any]) -> None:
        output = self.plan.output
        descriptor = ir.script.address_of(self.body.maps[output.map.name])
        row, *matrix = coordinates(output, places)
        down, across = self._corner()
        row = row + down
        for box in range(self._boxes):
            place = (across + box * output.map.box[0], row, *matrix)
            run(ir.script.ptx[store_name(len(place))](descriptor, *place, self._address(box)))
        run(ir.script.ptx.cp.async_.bulk.commit_group())


class ColumnStore(ResultStore):
    """The results of one warpgroup of those that share columns; boxes lie where queries were."""

    def _address(self, box: int, inside: Any = 0) -> Any:
        output = self.plan.output
        offset = self.warpgroup * (self._boxes * output.pitch) + (box * output.pitch + inside)
        return self.body.region("queries")(offset)

    def _corner(self) -> tuple[Any, Any]:
        return 0, self.warpgroup * self.plan.columns
