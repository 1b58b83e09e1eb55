"""Family ``rows_chain``: one persistent kernel makes rows, and two products behind them.

A norm, a feed-forward block and its residual are one launch so: the rows, then the tiles of
`crossfuse.planner.families.l2`. Rows and the intermediate pass through the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cascade import rows_space
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.rows_product import RowsProduct
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.counts import choose
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import ROWS_CHAIN
from crossfuse.planner.families.cascade import CascadeFamily, CascadeKernel, Steps, Timed
from crossfuse.planner.families.family import of_rules
from crossfuse.planner.families.l2 import FAMILY as STAGED
from crossfuse.planner.families.l2 import StagedKernel
from crossfuse.planner.kernels.arrays import count
from crossfuse.planner.kernels.shape import Shape, TileRule
from crossfuse.schema import Tile

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site


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
BESIDE_ROWS_OF_ONE, BESIDE_ROWS_OF_TWO, BESIDE_ROWS_OF_THREE = 216, 176, 112


def _hold_beside_rows(kernel: StagedKernel, shape: Shape) -> TileRule:
    """Make the rule that registers hold the sums of two products beside what makes rows."""
    first, second = kernel.phases(shape)
    groups = first.warpgroups
    several = choose(groups > 2, BESIDE_ROWS_OF_THREE, BESIDE_ROWS_OF_TWO)
    most = choose(groups > 1, several, BESIDE_ROWS_OF_ONE)
    text = "registers hold the sums of both products beside what makes rows"
    return TileRule("registers beside rows", text, first.sums + second.sums <= most)


def _together(kernels: StagedKernel) -> RowsChainTiles:
    """Tiles of arrays of kernels of arrays."""
    first: Any = (kernels.rows, kernels.columns, kernels.size, kernels.across, kernels.stacked)
    second: Any = (kernels.columns2, choose(kernels.split2, kernels.size, 1))
    return RowsChainTiles(*first, *second)


def _listed(kernels: StagedKernel) -> tuple[RowsChainTiles, ...]:
    """Split kernels of arrays into tiles, one by one."""
    whole: Any = vars(_together(kernels))
    kinds = {name: bool if name == "stacked" else int for name in whole}
    columns = [np.asarray(each).astype(kinds[name]).tolist() for name, each in whole.items()]
    return tuple(RowsChainTiles(*each) for each in zip(*columns, strict=True))


class RowsChain(CascadeFamily[RowsChainTiles]):
    """A norm, or another cascade of rows, and a chain of two products of what it makes."""

    name: ClassVar[str] = ROWS_CHAIN
    text: ClassVar[str] = "rows of a cascade, then two products one behind the other, in one kernel"
    form: ClassVar[str] = "Rows first, then both products in the same kernel"
    rule: ClassVar[str] = "rows_chain.schedule_rows_chain"
    kind: ClassVar[Any] = RowsChainTiles
    axes: ClassVar[tuple[str, ...]] = (
        *("rows", "columns", "cluster", "across", "stacked", "columns2", "split2"),
    )
    second: ClassVar[tuple[str, ...]] = ("columns2", "split2")
    most: ClassVar[int] = 8

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether a cascade makes the rows of a chain of two products."""
        return shape.product is not None and len(shape.product.chain.products) == 2

    @property
    def product(self) -> RowsProduct:
        """What is counted of rows and products."""
        assert self.shape.product is not None
        return self.shape.product

    def _kernels(self, device: Device) -> tuple[Steps, StagedKernel]:
        """List the kernels of the chain that have room for what makes rows, as one of arrays."""
        shape = self.product.shape
        found: Any = STAGED.every(shape, device)
        steps = STAGED.pruned(shape, device)
        if not count(found):
            return steps, found
        rules = (
            *rows_space.rules_beside_rows(found, shape, device),
            _hold_beside_rows(found, shape),
        )
        return rows_space.pruned_by(found, rules, steps)

    def candidates(self, device: Device) -> tuple[Steps, tuple[RowsChainTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        steps, kernels = self._kernels(device)
        return steps, _listed(kernels)

    def time(self, tiles: RowsChainTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return rows_space.rows_estimate(self.product, tiles.kernel, device, rates)

    def timed(
        self, device: Device, rates: Rates
    ) -> tuple[Steps, tuple[Timed[RowsChainTiles], ...]]:
        """Time all tiles at once: asking the learned trees one by one is slow."""
        steps, kernels = self._kernels(device)
        tiles = _listed(kernels)
        if not tiles:
            return steps, ()
        found = rows_space.rows_estimate(self.product, kernels, device, rates)
        every = CascadeKernel(self, _together(kernels))
        whole = np.asarray(with_own(found, rates.own, every, self.shape, device).microseconds)
        times = np.broadcast_to(whole.astype(np.float64), (len(tiles),)).tolist()
        return steps, tuple(self.ordered(list(zip(times, tiles, strict=True))))

    def ordered(self, times: Sequence[Timed[RowsChainTiles]]) -> list[Timed[RowsChainTiles]]:
        """Sort tiles by their times, the best first; of equal ones those of fewer rows."""
        return rows_space.ordered(times)

    def moved(self, tiles: RowsChainTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return rows_space.rows_bytes(self.product, tiles.kernel)

    def place_of(self, tiles: RowsChainTiles) -> str:
        """Describe where rows and the intermediate are stored."""
        return "rows and intermediate in L2"

    def taken(self, tiles: RowsChainTiles, device: Device) -> Taken:
        """Resources of the chain's kernel; the warps that make rows are part of it anyway."""
        shape = self.product.shape
        (found,) = tiles.kernel.resources(shape, device)
        tasks = max(int(each.tiles) for each in tiles.kernel.phases(shape)) * found.cluster
        room = rows_space.rows_memory(self.product, tiles.kernel, device)
        waves = round(max(1.0, tasks / found.busy), 2)
        ends = (found.ctas, found.cluster, found.threads)
        return Taken(*ends, 1, found.sums, int(room.size), waves)

    def computed(self, tiles: RowsChainTiles) -> dict[str, int]:
        """Operations of the products, and instructions for each element of a row."""
        return {"tensor": self.product.chain.flops, **instructions(self.product.rows)}

    @classmethod
    def schedule(
        cls, site: Site, derivation: Derivation, tiles: RowsChainTiles, *, constant: bool
    ) -> Any:
        """Take the function apart, and write rows and products as one kernel."""
        return of_rules("rows_chain.chain_behind_rows")(site.function, tiles, constant)
