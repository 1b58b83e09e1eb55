"""Tile extents of the rules for tensor cores: given by the caller, or chosen by the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import ROW_BYTES, Device, device
from crossfuse.planner.cost.estimate import fill_tiles
from crossfuse.planner.families.tiled import (
    GemmKernel,
    SeparateKernels,
    StagedKernel,
    TiledKernel,
)
from crossfuse.planner.kernels.phase import widest
from crossfuse.planner.kernels.shape import Flag, shape_of_blocks
from crossfuse.schema import Tile


@checked
@dataclass(frozen=True)
class TensorTiles:
    """How a product is divided. Zero means: choose."""

    #: Rows of the output tile of a CTA: 64 for each warpgroup that multiplies, and 256 for two that
    #: multiply 128 each.
    rows: Tile = 0
    #: Columns of the tile, a multiple of 8 up to 256; of 256 rows, up to 192 of all products.
    columns: Tile = 0
    #: CTAs of a cluster, stacked along the rows; 1 if the reduction is split.
    cluster: Tile = 0
    #: CTAs of a cluster that each sum a part of the reduction; of a chain's first product only
    #: where its intermediate passes from one kernel to the next. 1 beside an open `cluster` leaves
    #: it to the choice, too.
    split: Tile = 1
    #: Tiles side by side that a cluster computes, each by as many CTAs as `split`; they share the
    #: left tiles.
    across: Tile = 0
    #: Stages in shared memory; 0 leaves it to the lowering, which takes as many as fit.
    stages: Tile = 0
    #: Chains: whether the clusters of the first products stand along the rows of the intermediate,
    #: so that their CTAs share the weights; else they lie along its columns, and share the rows of
    #: A. None leaves it to the choice.
    stacked: bool | None = None

    @property
    def size(self) -> int:
        """CTAs of a cluster along its first axis; 0 where that is open."""
        return self.split if self.split > 1 else self.cluster

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose."""
        return not (self.rows and self.columns and self.size)

    def complete(
        self,
        sch: Any,
        chain: Chain,
        on: Device | None = None,
        allowed: Callable[[Any], Flag] = lambda _: True,
    ) -> TensorTiles:
        """Choose the sizes of one product that the caller left open.

        Without any the fastest by the planner's estimate, of kernels that `allowed` flags; beside
        given ones those that use a tensor core best.
        """
        if not (self.rows or self.columns or self.size or self.across) and self.split == 1:
            return replace(self, **_filled(GemmKernel, sch, chain, (self,), {}, allowed, on))
        rows = self.rows or (128 if chain.m > 64 else 64)
        several = chain.m > rows and self.split == 1
        return replace(
            self,
            rows=rows,
            columns=self.columns or min(widest(rows), -(-chain.n // 8) * 8),
            cluster=self.cluster or (2 if several else 1),
            across=self.across or 1,
        )


def complete_pair(
    sch: Any,
    chain: Chain,
    first: TensorTiles,
    second: TensorTiles,
    on: Device,
    *,
    staged: bool = True,
    allowed: Callable[[Any], Flag] = lambda _: True,
) -> tuple[TensorTiles, TensorTiles]:
    """Choose the sizes of two products that the caller left open, as `TensorTiles.complete` does.

    An axis has one extent in a function: both phases have clusters of one shape.
    """
    first = replace(first, rows=first.rows or second.rows)
    second = replace(second, rows=second.rows or first.rows)
    if first.is_open or second.is_open:
        given = {"rows": first.rows, "columns": first.columns, "columns2": second.columns}
        given |= {"size": first.size or second.size, "across": first.across}
        given |= _splits(first, "split") | _splits(second, "split2")
        given |= {} if first.stacked is None else {"stacked": int(first.stacked)}
        kind = StagedKernel if staged else SeparateKernels
        agree = first.rows == second.rows and first.size in (0, second.size or first.size)
        which = allowed if agree else lambda _: False
        found = _filled(kind, sch, chain, (first, second), given, which, on)
        first, second = replace(first, **found["first"]), replace(second, **found["second"])
    across = first.across or 1
    return (
        replace(first, cluster=first.cluster or 1, across=across, stacked=bool(first.stacked)),
        replace(second, cluster=second.cluster or 1, across=across),
    )


def _splits(tiles: TensorTiles, name: str) -> dict[str, int]:
    """Whether a reduction is split, where that is not open."""
    return {name: int(tiles.split > 1)} if tiles.size else {}


def _filled(
    kind: type[TiledKernel],
    sch: Any,
    chain: Chain,
    tiles: tuple[TensorTiles, ...],
    given: Mapping[str, int],
    allowed: Callable[[Any], Flag],
    on: Device | None,
) -> dict[str, Any]:
    """Fields of the tiles of the fastest kernel that has what is given, or a refusal."""
    shape, flags = shape_of_blocks(chain), ("stacked", "split", "split2")
    fixed = {name: each for name, each in given.items() if each or name in flags}
    found = fill_tiles(kind.possible(shape, fixed), shape, on or device(), allowed)
    if found is not None:
        return found.tiles()
    raise refuse(
        ScheduleRefused,
        "tensor-tiles",
        name_of(sch, chain.first[0]),
        found=f"{shape.text}{chain.narrow}, for {' and '.join(map(str, tiles))}",
        limit="columns in multiples of 8 that registers hold sums of, clusters of 1, 2, 4, 8 or 16 "
        "CTAs, and reductions that they share evenly; one number of rows, and one size of clusters",
        instead="leave tiles open, or give rows, columns and cluster of each product",
    )


def row_bytes_depth(sch: Any, product: Any, index: int = 0) -> int:
    """Elements of an operand of a product that fill a row of a tile."""
    dtype = ir.tvm.DataType(str(sch.get(product).reads[index].source.ty.dtype))
    return ROW_BYTES * 8 // int(dtype.bits)
