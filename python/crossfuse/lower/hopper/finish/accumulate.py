"""Partial tiles of several clusters added by TMA: float32 boxes, added to one sum in L2."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper.finish.box_place import BoxPlace
from crossfuse.lower.hopper.finish.epilogue import Epilogue
from crossfuse.lower.hopper.plan.phase import WARP_ROWS
from crossfuse.lower.hopper.plan.store import StoreBox
from crossfuse.lower.hopper.statements import let, run
from crossfuse.lower.hopper.warmup import hidden
from crossfuse.planner.kernels.boxes import ROW_BYTES

_TMA_ADD = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
#: Bytes that the swizzle moves as one.
_CHUNK = 16


class Accumulation(Epilogue):
    """Adds the tile of a multiplying warpgroup to what other clusters add to.

    ::

        CTA of part 0           CTA of part 1           in L2, zero before
        registers               registers
        boxes of 64 x 32        boxes of 64 x 32
              | add                   | add             sums: tile [64, 96]
              +-----------------------+---------------> flag, once for each part

    Boxes are those of a store by TMA, but of float32, and each element is added in L2: in which
    order is not said. A box reaches beyond no tensor: what lies there is not added. The flag is
    raised when the additions are done (`wait_group 0`), not when their boxes have been read.
    """

    def _fill_box(self, box: StoreBox, row: Any, column: Any, place: BoxPlace) -> None:
        """Two neighbours of a row are one store of eight bytes; rows are swizzled."""
        # Hidden, or addresses are computed ahead of all products and kept in registers.
        thread = let("thread_of_box", hidden(self.where.thread))
        lane = thread % WARP
        top = let("row_of_box", thread // WARP * WARP_ROWS + lane // 4)
        store = ir.script.ptx["st.shared.v2.f32"]
        for index in range(box.first // 2, (box.first + box.columns) // 2, 2):
            block, half = index // 4 - box.first // 8, index // 2 % 2
            here = top + 8 * half
            # Every swizzle goes by the number of the 128 bytes that a row lies in.
            pattern = here * box.pitch // ROW_BYTES % (box.pitch // _CHUNK)
            chunk = (2 * block + lane % 4 // 2) ^ pattern
            inside = here * box.pitch + chunk * _CHUNK + lane % 2 * (_CHUNK // 2)
            (low,), (high,) = self.fragment.sums(index), self.fragment.sums(index + 1)
            run(store(place.address(box.offset, inside), low, high))

    def _copy_box(self, box: StoreBox, row: Any, column: Any, place: BoxPlace) -> None:
        call = ir.script.ptx[_TMA_ADD]
        address = ir.script.address_of(self.descriptors[box.map.name])
        run(call(address, column + box.first, row, place.address(box.offset)))
