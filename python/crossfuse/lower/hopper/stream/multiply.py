"""The two products of a stream, as one warpgroup issues them."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.operands import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import Variable, let, registers, run
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.plan.memory import BOX
from crossfuse.lower.hopper.stream.plan.registers import instruction_sums
from crossfuse.lower.hopper.stream.values import Elements
from crossfuse.lower.hopper.wgmma_instruction import K_BYTES, clear, hold, multiply, swizzled, words
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Rows of values that one wgmma multiplies, in bytes of a box.
_GROUP_BYTES = GROUP * ROW_BYTES
#: Columns of a box of values, of 16 bits.
_BOX_COLUMNS = ROW_BYTES // 2


class ScoreProduct:
    """One warpgroup's first product: 64 rows of the queries by keys.

    `warpgroup` is its index among those that have rows of their own.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        self.plan = body.plan
        self.elements = elements
        share = warpgroup * (WARPGROUP_ROWS * ROW_BYTES)
        self._queries = swizzled("queries", body.region("queries")(share))
        self._keys = swizzled("keys", body.region("keys")(0))
        self._types = (self.plan.program.dtype,) * 2

    def score(self, slot: Any, stage: Any) -> None:
        """Issue the product of queries and keys."""
        self.hold_scores()
        accumulators = _begin(self.elements.scores, self.plan.scores)
        left, right = self.plan.queries, self.plan.keys
        queries = let("queries_tile", self._queries.value + words(slot * left.size))
        keys = let("keys_tile", self._keys.value + words(stage * right.size))
        for part in range(self.plan.program.queries.columns // GROUP):
            box, inside = divmod(part * K_BYTES, ROW_BYTES)
            first, second = (_words(box * each.pitch + inside) for each in (left, right))
            operands = [queries + first], keys + second
            multiply(self._types, accumulators, *operands, ir.script.uint32(part > 0))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def hold_scores(self) -> None:
        """Keep the compiler from moving scores across this place."""
        hold(self.elements.scores, self.plan.scores)

    @staticmethod
    def wait(pending: int) -> None:
        """Wait until at most `pending` products are under way."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))


class Multiplier(ScoreProduct):
    """One warpgroup's products: 64 rows of the queries by keys, and of weights by values."""

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        self.sums = registers("sums", body.plan.sums, "float32")
        super().__init__(body, warpgroup, elements)
        self._values = of_values(body, 0)

    def clear(self) -> None:
        """Give the sums a value: nobody reads it, but they are in use from here on."""
        clear(self.sums, self.plan.sums)

    def add(self, stage: Any, keep: Any) -> None:
        """Issue the product of weights and values; `keep` is 0 for the first tile of keys."""
        self.hold_sums()
        accumulators = _begin(self.sums, self.plan.sums)
        values = let("values_tile", self._values.value + words(stage * self.plan.values.size))
        for part in range(self.plan.program.tile[1] // GROUP):
            left = [
                self.elements.words[part * GROUP_REGISTERS + each]
                for each in range(GROUP_REGISTERS)
            ]
            right = values + _words(part * _GROUP_BYTES)
            kept = keep if part == 0 else ir.script.uint32(1)
            multiply(self._types, accumulators, left, right, kept, transposed=True)
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def hold_sums(self) -> None:
        """Keep the compiler from moving sums, and weights, across this place."""
        hold(self.sums, self.plan.sums)
        hold(self.elements.words, self.plan.words)


class SumProduct:
    """The second product of some columns, with weights in shared memory.

    `group` is the index of the warpgroup among those that share columns.
    """

    def __init__(self, body: StreamBody, group: Any) -> None:
        self.plan = body.plan
        self.sums = registers("sums", self.plan.sums, "float32")
        self._width = instruction_sums(self.plan.sums, self.plan.threads)
        boxes = self.plan.columns // _BOX_COLUMNS  # the first column begins a box
        self._weights = swizzled("weights", body.region("passed")(0))
        self._values = of_values(body, group * (boxes * self.plan.values.pitch))
        self._types = (self.plan.program.dtype,) * 2

    def clear(self) -> None:
        """Give the sums a value: nobody reads it, but they are in use from here on."""
        clear(self.sums, self.plan.sums)

    def add(self, stage: Any, keep: Any) -> None:
        """Multiply weights and values, and wait; `keep` is 0 for the first tile of keys."""
        hold(self.sums, self.plan.sums)
        accumulators = _begin(self.sums, self.plan.sums)
        values = let("values_tile", self._values.value + words(stage * self.plan.values.size))
        for part in range(self.plan.program.tile[1] // GROUP):
            box, inside = divmod(part * K_BYTES, ROW_BYTES)
            left = self._weights.value + _words(box * BOX + inside)
            right = values + _words(part * _GROUP_BYTES)
            kept = keep if part == 0 else ir.script.uint32(1)
            for first in range(0, self.plan.sums, self._width):
                several = accumulators[first : first + self._width]
                box = 2 * first // _BOX_COLUMNS
                there = right + _words(box * self.plan.values.pitch)
                multiply(self._types, several, [left], there, kept, transposed=True)
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(0))
        hold(self.sums, self.plan.sums)


def of_values(body: StreamBody, offset: Any) -> Variable:
    """Descriptor of values from a column on.

    They repeat every 8 keys and, by the leading offset, with every box.
    """
    name = "keys" if body.plan.program.shares_tile else "values"
    return swizzled("values", body.region(name)(offset), body.plan.values.pitch)


def _begin(sums: Any, count: int) -> list[Any]:
    """Order what has been written to registers before the product; returns these."""
    run(ir.script.ptx.wgmma.fence.sync.aligned())
    return [sums[each] for each in range(count)]


def _words(offset: int) -> Any:
    """A constant offset in bytes in a descriptor's units."""
    return ir.script.uint64(offset // 16)
