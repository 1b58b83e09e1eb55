"""What the warpgroup that makes scores hands to those that add: weights and values of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.stream.plan.registers import RegisterPlan
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.hopper.stream.recover.settle import reads
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

_FLOAT = 4
#: Bytes of 64 rows of weights in a row of a swizzled tile each.
BOX = WARPGROUP_ROWS * ROW_BYTES
#: Weights of 16 bits in such a row.
BOX_KEYS = ROW_BYTES // 2


@dataclass(frozen=True)
class Passed:
    """Where it lies in shared memory.

    Attributes
    ----------
    boxes : int
        Boxes of weights, each of 64 keys.
    carried : tuple
        Buffers of rows that sums are multiplied by before a tile is added.
    finished : tuple
        Buffers of rows that results are made of, behind the last tile.
    """

    boxes: int
    carried: tuple[Any, ...]
    finished: tuple[Any, ...]

    @property
    def bytes(self) -> int:
        """All of it: weights, then rows of float32."""
        count = len(self.carried) + len(self.finished)
        return self.boxes * BOX + count * WARPGROUP_ROWS * _FLOAT

    @property
    def of_rows(self) -> int:
        """Offset of the rows' values."""
        return self.boxes * BOX


def plan_passed(program: StreamProgram, registers: RegisterPlan) -> Passed:
    """Find what is read of the rows where sums are."""

    def read_by(values: list[Any]) -> tuple[Any, ...]:
        return tuple(each for each in registers.rows if any(reads(v, each) for v in values))

    return Passed(
        -(-program.tile[1] // BOX_KEYS),
        read_by([each.value for each in program.carries]),
        read_by([program.result]),
    )
