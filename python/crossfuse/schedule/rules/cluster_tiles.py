"""Tile extents of chains whose intermediate stays in a cluster: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from crossfuse.blocks.chain import Chain
from crossfuse.calls import checked
from crossfuse.planner.families.dsm import SLICE, ClusteredKernel
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.schedule.rules.parted_tiles import PartedTiles
from crossfuse.schema import Tile


@checked
@dataclass(frozen=True)
class ClusterTiles(PartedTiles):
    """How a chain is divided over clusters. Zero means: choose."""

    kind: ClassVar[type[ClusteredKernel]] = ClusteredKernel
    rule: ClassVar[str] = "cluster-tiles"
    instead: ClassVar[str] = "leave tiles open, or keep the intermediate in L2 (schedule_tiled_ffn)"
    #: Rows of a cluster's tile: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: CTAs of a cluster: each makes a slice of the intermediate and of the output.
    cluster: Tile = 0
    #: Parts of the intermediate's columns, which different clusters make.
    parts: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0
    #: Slices of the intermediate are multiples of this many columns: whole steps of the second
    #: product in ring order.
    multiple: Tile = field(default=SLICE, repr=False)

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"clusters with slices of multiples of {self.multiple} and 8 columns that find room at "
            "the same time, and parts that each have some; elements of 16 bits"
        )

    @property
    def kernel(self) -> ClusteredKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return ClusteredKernel(self.rows, self.cluster, self.parts, self.multiple)

    def share(self, chain: Chain) -> int:
        """Columns of the intermediate that a cluster makes."""
        return self.cluster * self.width(chain)

    def columns(self, chain: Chain) -> int:
        """Columns of a CTA's tile of the output; the last one may reach beyond it."""
        return int(self.kernel.columns(shape_of_blocks(chain)))

    def pads(self, chain: Chain) -> bool:
        """Whether slices reach beyond the intermediate."""
        return self.parts * self.share(chain) > chain.n
