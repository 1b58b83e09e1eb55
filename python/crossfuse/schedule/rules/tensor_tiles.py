"""Tile extents of the rules for tensor cores: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.schedule.rules.chain import Chain

#: Bytes of a row of a tile in shared memory: what one swizzle pattern spans.
_ROW_BYTES = 128


@dataclass(frozen=True)
class TensorTiles:
    """How a product is divided. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of the output tile of a CTA: 64 for each warpgroup that multiplies.
    columns : int
        Columns of the tile, a multiple of 8 up to 256.
    depth : int
        Elements of the reduction in a stage.
    cluster : int
        CTAs of a cluster, stacked along the rows; 1 if the reduction is split.
    split : int
        CTAs of a cluster that each sum a part of the reduction.
    stages : int
        Stages in shared memory; 0 leaves it to the lowering, which takes as many as fit.
    """

    rows: int = 0
    columns: int = 0
    depth: int = 0
    cluster: int = 0
    split: int = 1
    stages: int = 0

    def complete(self, sch: Any, chain: Chain) -> TensorTiles:
        """Fill in what the caller left open."""
        (product,) = chain.first
        dtype = ir.tvm.DataType(str(sch.get(product).reads[0].source.ty.dtype))
        rows = self.rows or (128 if chain.m > 64 else 64)
        several = chain.m > rows and self.split == 1
        return replace(
            self,
            rows=rows,
            columns=self.columns or _columns(chain.n),
            depth=self.depth or _ROW_BYTES * 8 // int(dtype.bits),
            cluster=self.cluster or (2 if several else 1),
        )


def _columns(width: int) -> int:
    """256 columns use a tensor core best; a narrow product gets no wider tile than it has."""
    return min(256, -(-width // 8) * 8)
