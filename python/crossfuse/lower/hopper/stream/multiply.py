"""The two products of a stream, as one warpgroup issues them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.operands import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import Variable, let, registers, run
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan, instruction_sums
from crossfuse.lower.hopper.stream.plan.memory import BOX
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
            types = (self.plan.program.dtype,) * 2
            multiply(types, accumulators, *operands, ir.script.uint32(part > 0))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def hold_scores(self) -> None:
        """Keep the compiler from moving scores across this place."""
        hold(self.elements.scores, self.plan.scores)

    @staticmethod
    def wait(pending: int) -> None:
        """Wait until at most `pending` products are under way."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))


class Sums:
    """Registers of a thread for the second product."""

    def __init__(self, body: StreamBody) -> None:
        self.plan = body.plan
        self.sums = registers("sums", self.plan.sums, "float32")

    def clear(self) -> None:
        """Give the sums a value: nobody reads it, but they are in use from here on."""
        clear(self.sums, self.plan.sums)


class Multiplier(Sums, ScoreProduct):
    """One warpgroup's products: 64 rows of the queries by keys, and of weights by values."""

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        Sums.__init__(self, body)
        ScoreProduct.__init__(self, body, warpgroup, elements)
        self._values = of_values(body, 0)

    def add(self, stage: Any, keep: Any) -> None:
        """Issue the product of weights and values; `keep` is 0 for the first tile of keys."""
        self.hold_sums()

        def left(part: int) -> list[Any]:
            words = range(part * GROUP_REGISTERS, (part + 1) * GROUP_REGISTERS)
            return [self.elements.words[each] for each in words]

        _add(self.plan, self.sums, left, self._values.value, stage, keep, self.plan.sums)

    def hold_sums(self) -> None:
        """Keep the compiler from moving sums, and weights, across this place."""
        hold(self.sums, self.plan.sums)
        hold(self.elements.words, self.plan.words)


class SumProduct(Sums):
    """The second product of some columns, with weights in shared memory.

    `group` is the index of the warpgroup among those that share columns.
    """

    def __init__(self, body: StreamBody, group: Any) -> None:
        super().__init__(body)
        self._width = instruction_sums(self.plan.sums, self.plan.threads)
        boxes = self.plan.columns // _BOX_COLUMNS  # the first column begins a box
        self._weights = swizzled("weights", body.region("passed")(0))
        self._values = of_values(body, group * (boxes * self.plan.values.pitch))

    def add(self, stage: Any, keep: Any) -> None:
        """Multiply weights and values, and wait; `keep` is 0 for the first tile of keys."""
        hold(self.sums, self.plan.sums)

        def left(part: int) -> list[Any]:
            box, inside = divmod(part * K_BYTES, ROW_BYTES)
            return [self._weights.value + _words(box * BOX + inside)]

        _add(self.plan, self.sums, left, self._values.value, stage, keep, self._width)
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(0))
        hold(self.sums, self.plan.sums)


def _add(
    plan: StreamPlan,
    sums: Any,
    left: Callable[[int], list[Any]],
    values: Any,
    stage: Any,
    keep: Any,
    width: int,
) -> None:
    """Issue the product of weights and a stage of values, by wgmma of `width` sums each.

    `left` gives the operand of each group of keys.
    """
    accumulators, types = _begin(sums, plan.sums), (plan.program.dtype,) * 2
    values = let("values_tile", values + words(stage * plan.values.size))
    for part in range(plan.program.tile[1] // GROUP):
        right = values + _words(part * _GROUP_BYTES)
        kept = keep if part == 0 else ir.script.uint32(1)
        operand = left(part)
        for first in range(0, plan.sums, width):
            several = accumulators[first : first + width]
            there = right + _words(2 * first // _BOX_COLUMNS * plan.values.pitch)
            multiply(types, several, operand, there, kept, transposed=True)
    run(ir.script.ptx.wgmma.commit_group.sync.aligned())


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
