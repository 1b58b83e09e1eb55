"""The two products of a stream, as one warpgroup issues them."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.hold import clear, hold
from crossfuse.lower.hopper.instruction import K_BYTES, multiply, swizzled, words
from crossfuse.lower.hopper.kept import GROUP, GROUP_REGISTERS
from crossfuse.lower.hopper.statements import let, registers, run
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.elements import Elements
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

#: Rows of values that one wgmma multiplies, in bytes of a box.
_GROUP_BYTES = GROUP * ROW_BYTES


class Multiplier:
    """One warpgroup's products: 64 rows of the queries by keys, and of weights by values.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    warpgroup : Any
        Index of the multiplying warpgroup.
    elements : Elements
        Registers of scores and weights.
    """

    def __init__(self, body: StreamBody, warpgroup: Any, elements: Elements) -> None:
        self.plan = body.plan
        self.elements = elements
        self.sums = registers("sums", self.plan.sums, "float32")
        share = warpgroup * (WARPGROUP_ROWS * ROW_BYTES)
        self._queries = swizzled("queries", body.region("queries")(share))
        self._keys = swizzled("keys", body.region("keys")(0))
        # Values repeat every 8 keys and, by the leading offset, with every box.
        self._values = swizzled("values", body.region("values")(0), self.plan.values.pitch)
        self._types = (self.plan.program.dtype,) * 2

    def clear(self) -> None:
        """Give the sums a value: nobody reads it, but they are in use from here on."""
        clear(self.sums, self.plan.sums)

    def score(self, slot: Any, stage: Any) -> None:
        """Issue the product of queries and keys."""
        self.hold_scores()
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        accumulators = [self.elements.scores[each] for each in range(self.plan.scores)]
        left, right = self.plan.queries, self.plan.keys
        queries = let("queries_tile", self._queries.value + words(slot * left.size))
        keys = let("keys_tile", self._keys.value + words(stage * right.size))
        for part in range(self.plan.program.queries.columns // GROUP):
            box, inside = divmod(part * K_BYTES, ROW_BYTES)
            first, second = (_words(box * each.pitch + inside) for each in (left, right))
            operands = [queries + first], keys + second
            multiply(self._types, accumulators, *operands, ir.script.uint32(part > 0))
        run(ir.script.ptx.wgmma.commit_group.sync.aligned())

    def add(self, stage: Any, keep: Any) -> None:
        """Issue the product of weights and values; `keep` is 0 for the first tile of keys."""
        self.hold_sums()
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        accumulators = [self.sums[each] for each in range(self.plan.sums)]
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

    def hold_scores(self) -> None:
        """Keep the compiler from moving scores across this place."""
        hold(self.elements.scores, self.plan.scores)

    def hold_sums(self) -> None:
        """Keep the compiler from moving sums, and weights, across this place."""
        hold(self.sums, self.plan.sums)
        hold(self.elements.words, self.plan.words)

    @staticmethod
    def wait(pending: int) -> None:
        """Wait until at most `pending` products are under way."""
        run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))


def _words(offset: int) -> Any:
    """A constant offset in bytes in a descriptor's units."""
    return ir.script.uint64(offset // 16)
