"""Family ``rows_chain``: one persistent kernel makes rows, and two products behind them.

A norm, a feed-forward block and its residual are one launch so: the rows, then the tiles of
the family ``l2``. Rows and the intermediate pass through the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from crossfuse.hardware import Device
from crossfuse.planner.families import ROWS_CHAIN
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.rows import RowsFirstFamily, rules_beside_rows
from crossfuse.planner.families.tiled import STAGED, StagedKernel
from crossfuse.planner.kernels.phase import by_warpgroups
from crossfuse.planner.kernels.shape import Shape, TileRule, choose
from crossfuse.schema import Tile


@dataclass(frozen=True)
class RowsChainTiles:
    """Tiles of both phases; how rows are made follows from the device.

    They are those of `crossfuse.schedule.rules.tensor_tiles.TensorTiles`, of one number of rows.
    """

    rows: Tile = 64
    columns: Tile = 64
    cluster: Tile = 1
    across: Tile = 1
    #: Whether the CTAs of a cluster lie below one another in the first phase; else side by side.
    stacked: bool = False
    #: Of the second phase: columns, and CTAs that share its reduction, which are 1 or a cluster.
    columns2: Tile = 64
    split2: Tile = 1

    @property
    def phases(self) -> dict[str, dict[str, Any]]:
        """Tiles of the rule, by phase."""
        first = {"rows": self.rows, "columns": self.columns, "cluster": self.cluster}
        cluster = 1 if self.split2 > 1 else self.cluster
        second = {"rows": self.rows, "columns": self.columns2, "cluster": cluster}
        return {
            "first": {**first, "split": 1, "across": self.across, "stacked": self.stacked},
            "second": {**second, "split": self.split2},
        }

    @property
    def kernel(self) -> StagedKernel:
        """The kernel of the products, as it would be alone."""
        return StagedKernel.read(self.phases)


#: Registers of a thread for the sums of both products where multiplying warpgroups make rows, by
#: how many these are. After RMS norms nvcc 13.0 spilt nothing at 216, 176 and 116, 960 bytes at
#: 240, 20 to 228 at 192 and 196, and 332 at 132; after a layer norm 40 bytes at 116.
_SUMS_OF_BOTH = {1: 216, 2: 176, 3: 112}


def rules_beside_chain(kernel: Any, shape: Shape, device: Device) -> tuple[TileRule, ...]:
    """Conditions on kernels of a chain, beside their own, under which they make rows."""
    first, second = kernel.phases(shape)
    room = by_warpgroups(_SUMS_OF_BOTH, first.warpgroups)
    text = "registers hold the sums of both products beside what makes rows"
    held = TileRule("registers beside rows", text, first.sums + second.sums <= room)
    return (*rules_beside_rows(kernel, shape, device), held)


class RowsChain(RowsFirstFamily[RowsChainTiles]):
    """A norm, or another cascade of rows, and a chain of two products of what it makes."""

    name: ClassVar[str] = ROWS_CHAIN
    text: ClassVar[str] = "rows of a cascade, then two products one behind the other, in one kernel"
    form: ClassVar[str] = "Rows first, then both products in the same kernel"
    rule: ClassVar[str] = "rows.schedule_rows_chain"
    kind: ClassVar[Any] = RowsChainTiles
    axes: ClassVar[tuple[str, ...]] = (
        *("rows", "columns", "cluster", "across", "stacked", "columns2", "split2"),
    )
    second: ClassVar[tuple[str, ...]] = ("columns2", "split2")
    products: ClassVar[ChainFamily] = STAGED
    of_rows: ClassVar[int] = 2

    def joined(self, kernels: StagedKernel) -> RowsChainTiles:
        """Make kernels of arrays tiles of arrays."""
        first: Any = (kernels.rows, kernels.columns, kernels.size, kernels.across, kernels.stacked)
        second: Any = (kernels.columns2, choose(kernels.split2, kernels.size, 1))
        return RowsChainTiles(*first, *second)

    def rules(self, kernel: StagedKernel, device: Device) -> tuple[TileRule, ...]:
        """Conditions on kernels of the chain, beside their own, under which they make rows."""
        return rules_beside_chain(kernel, self.product.shape, device)

    def place_of(self, tiles: RowsChainTiles) -> str:
        """Describe where rows and the intermediate are stored."""
        return "rows and intermediate in L2"
