"""What a warpgroup does to each tile of scores."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.store import PACKED_TYPES
from crossfuse.lower.hopper.statements import let, registers, run, when
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.program.affine import Affine, inequality
from crossfuse.lower.hopper.stream.program.parts import Kind, Step
from crossfuse.lower.hopper.stream.rows import RowState
from crossfuse.lower.hopper.stream.values import Values, column_of, half_of
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


class Elements:
    """Registers of the elements of a tile, and the steps that go through them.

    Parameters
    ----------
    plan : StreamPlan
        The kernel.
    """

    def __init__(self, plan: StreamPlan) -> None:
        self.plan = plan
        self.program = plan.program
        names = ["scores", *(f"elements_{each}" for each in range(1, plan.registers.count))]
        self.arrays = [registers(each, plan.scores, "float32") for each in names]
        self.words = registers("weights", plan.words, "uint32")

    @property
    def scores(self) -> Any:
        """The registers of the first product."""
        return self.arrays[0]

    def register(self, buffer: Any, register: int) -> Any:
        """The register of an element."""
        return self._array(buffer)[register]

    def _array(self, buffer: Any) -> Any:
        number = self.plan.registers.array(buffer)
        assert number is not None, buffer
        return self.arrays[number]

    def run(self, rows: RowState, values: Values) -> None:
        """Everything that is done to a tile, but for its weights."""
        for step in self.program.steps:
            if step.kind is Kind.ROW:
                rows.run(step, values)
            elif step.kind is Kind.TILE:
                self._store(step, values)
            elif step.kind is Kind.MASK:
                self._mask(step, values)
            else:
                deferred = any(each.same_as(step.target) for each in self.plan.registers.deferred)
                rows.reduce(step, values, self.plan.scores, deferred=deferred)

    def pack(self, values: Values) -> None:
        """Round the weights: pairs of neighbours share a register, as wgmma takes them."""
        step = self.program.weights
        value = step.value
        if isinstance(value, ir.tirx.Cast) and str(value.value.ty) == "float32":
            value = value.value
        convert = getattr(ir.script.ptx.cvt.rn, PACKED_TYPES[self.program.dtype]).f32
        for word in range(self.plan.words):
            low, high = (values.of_element(value, 2 * word + each) for each in range(2))
            run(convert(self.words[word], high, low))

    def _store(self, step: Step, values: Values) -> None:
        for register in range(self.plan.scores):
            value = values.of_element(step.value, register)
            ir.script.buffer_store(self._array(step.target), value, [register])

    def _mask(self, step: Step, values: Values) -> None:
        """Replace elements where a condition does not hold, in tiles that may have such."""
        found = inequality(step.value, self.program)
        if found is None:
            for register in range(self.plan.scores):
                self._choose(step, register, values.of_element(step.value, register))
            return
        least = let("least", self._least(found, values))
        with when(least < 0):
            firsts = [
                let("margin", values.placed(found.value, row, values.lanes.column))
                for row in values.lanes.rows
            ]
            for register in range(self.plan.scores):
                step_of_column = -found.key * column_of(register)
                self._choose(step, register, firsts[half_of(register)] >= step_of_column)

    def _least(self, found: Affine, values: Values) -> Any:
        """The margin of a condition where it is least among the warpgroup's elements."""
        row = values.lanes.base + (WARPGROUP_ROWS - 1 if found.row < 0 else 0)
        key = ir.tirx.IntImm("int32", self.program.tile[1] - 1 if found.key < 0 else 0)
        return values.placed(found.value, row, key)

    def _choose(self, step: Step, register: int, holds: Any) -> None:
        elements = self._array(step.target)
        chosen = ir.script.Select(holds, elements[register], step.start)
        ir.script.buffer_store(elements, chosen, [register])
