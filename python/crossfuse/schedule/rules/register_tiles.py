"""Tile extents of chains whose intermediate stays in registers: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from crossfuse.blocks.chain import Chain
from crossfuse.calls import checked
from crossfuse.planner.families.registers import REGISTERS, STEP, RegisterKernel
from crossfuse.planner.kernels.arrays import Flag
from crossfuse.schedule.rules.parted_tiles import PartedTiles
from crossfuse.schema import Tile

#: Registers for the intermediate and the sums that it is made of, where the rule chooses: a long
#: epilogue needs some more.
_MAKING = 160


@checked
@dataclass(frozen=True)
class RegisterTiles(PartedTiles):
    """How a chain is divided over CTAs. Zero means: choose."""

    kind: ClassVar[type[RegisterKernel]] = RegisterKernel
    rule: ClassVar[str] = "register-tiles"
    instead: ClassVar[str] = (
        "leave tiles open, or keep the intermediate in the cluster (schedule_clustered_ffn) or in "
        "L2 (schedule_tiled_ffn)"
    )
    #: Rows of a CTA's tiles: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: Columns of a tile of the output. Each CTA makes the intermediate that it needs: where several
    #: tiles stand side by side, it is made several times.
    columns: Tile = 0
    #: Parts of the intermediate's columns, which different CTAs make.
    parts: Tile = 0
    #: 1: the parts are summed through L2. As many as parts: they are the CTAs of a cluster, which
    #: sum them through DSM.
    cluster: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0

    def in_l2(self) -> RegisterTiles:
        """Tiles whose parts are summed through L2, whatever the caller left open."""
        return replace(self, cluster=self.cluster or 1)

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"parts of a multiple of {STEP} columns, each with some of them, of at most "
            f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
            f"of a multiple of 8 that together take {REGISTERS} registers a thread; parts "
            "that all find room at the same time, or that are the CTAs of a cluster and have "
            "as many rows of a tile each; elements of 16 bits"
        )

    def leaves_room(self, chain: Chain, kernels: RegisterKernel) -> Flag:
        """Whether chosen numbers of parts leave registers for an epilogue of any length."""
        column = len(chain.first) / 2 + 1 / 4
        return bool(self.parts) | (column * chain.n <= _MAKING * kernels.parts)

    @property
    def kernel(self) -> RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return RegisterKernel(self.rows, self.columns, self.parts, self.cluster)
