"""Tile extents of the rules for tensor cores: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain
from crossfuse.calls import checked
from crossfuse.hardware import ROW_BYTES, Device
from crossfuse.planner.kernels.phase import widest
from crossfuse.planner.kernels.shape import divides_equally
from crossfuse.schema import Tile

# Tiles of chains with several tiles of rows: a cluster's CTAs share the weights, not the rows.

#: Cost of a tile besides its columns, in columns: filling the rings of stages, and its epilogue.
_BESIDE = 16
_NARROWEST = 64


def row_tiles(chain: Chain, rows: int) -> int:
    """Tiles on top of each other."""
    return -(-chain.m // rows)


def is_wide(chain: Chain, rows: int, device: Device) -> bool:
    """Whether there are several tiles of rows, with 64 columns at least for each SM."""
    down = row_tiles(chain, rows)
    return down > 1 and down * chain.n >= _NARROWEST * device.sms


def stacked_across(chain: Chain, rows: int, most: int, cluster: int, device: Device) -> int:
    """Tiles side by side in a cluster: two share the rows of A too, if there are several waves.

    They halve what comes from L2, and leave 12 SMs of an H100 without work: 122 instead of 144 us
    for widths of 4096 and 11008 at M = 256, but 92 instead of 79 for 3072 and 8192, whose tiles
    then take a second wave.
    """
    down = row_tiles(chain, rows)
    columns = stacked_columns(chain, rows, most, cluster, 1, device)
    turns = -(-chain.n // columns) > device.resident_clusters(cluster)
    return 2 if cluster == down == 2 and turns else 1


def stacked_columns(
    chain: Chain, rows: int, most: int, cluster: int, across: int, device: Device
) -> int:
    """Columns of the first products' tiles, by which the last wave of tiles fills the GPU best.

    Accumulators allow `most` columns; a CTA's tile has `rows`, and a cluster `cluster` CTAs one
    below the other and `across` side by side.
    """
    down = row_tiles(chain, rows * cluster)
    room = device.resident_clusters(cluster * across)

    def cost(columns: int) -> int:
        tiles = down * -(-chain.n // (columns * across))
        return -(-tiles // room) * (columns + _BESIDE)

    # CTAs that share a tile load whole groups of eight rows of it each. Tiles of 128 rows were
    # measured with columns that are no multiple of that, and so with weights that nobody shares.
    step = 8 * cluster if rows > 128 else 8
    widest_shared = most - most % step
    return min(range(widest_shared, min(_NARROWEST, widest_shared) - 1, -step), key=cost)


def stacked_split(
    chain: Chain, rows: int, depth: int, cluster: int, across: int, device: Device
) -> tuple[int, int]:
    """CTAs that share a tile's reduction in the second product, and the columns of its tile.

    The reduction is split over the `cluster` CTAs of a cluster, or else they stand along the rows;
    `across` CTAs lie side by side. A step has `depth` elements of the reduction.
    """
    down = row_tiles(chain, rows)
    room = device.resident_clusters(cluster * across)
    most = room // down * across
    if most and divides_equally(chain.n, cluster, depth) and chain.m % rows == 0:
        columns = _whole(-(-chain.l // most))
        if columns <= widest(rows):
            return cluster, columns
    most = max(1, room // -(-down // cluster)) * across
    return 1, min(widest(rows), max(_NARROWEST, _whole(-(-chain.l // most))))


def _whole(columns: int) -> int:
    return -(-columns // 16) * 16


#: Kernels for few rows are spread over the CTAs that clusters of this size find room for.
_CLUSTER = 4


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
    #: where its intermediate passes from one kernel to the next.
    split: Tile = 1
    #: Chains: tiles side by side that a cluster computes, each by as many CTAs as `split`; they
    #: share the tiles of the intermediate.
    across: Tile = 0
    #: Stages in shared memory; 0 leaves it to the lowering, which takes as many as fit.
    stages: Tile = 0
    #: Chains: whether the clusters of the first products stand along the rows of the intermediate,
    #: so that their CTAs share the weights; else they lie along its columns, and share the rows of
    #: A. None takes the former for several tiles of rows.
    stacked: bool | None = None

    def complete(self, chain: Chain) -> TensorTiles:
        """Choose the sizes that the caller left open."""
        rows = self.rows or tile_rows(chain)
        several = chain.m > rows and self.split == 1
        return replace(
            self,
            rows=rows,
            columns=self.columns or _columns(chain.n, widest(rows)),
            cluster=self.cluster or (2 if several else 1),
            across=self.across or 1,
        )

    def of_first(
        self,
        sch: Any,
        chain: Chain,
        device: Device,
        *,
        staged: bool = True,
    ) -> TensorTiles:
        """Choose the open sizes of a chain's first products.

        Unless it is `staged`, the reduction of a product that has far more to add than columns to
        divide, such as that of a convolution, is split over the cluster.
        """
        given = self.stacked is not None
        free_tile = not (given or self.cluster or self.columns or self.across)
        free_rows = staged and free_tile
        rows = self.rows or (tall_rows(chain, device) if free_rows else tile_rows(chain))
        most = widest(rows, len(chain.first))
        depth = row_bytes_depth(sch, chain.first[0])
        stacked = self.stacked
        if stacked is None:
            free = self.cluster in (0, 2) and self.split == 1
            stacked = free and is_wide(chain, rows, device)
        if stacked:
            tiles = replace(self, rows=rows, stacked=True)
            return tiles._stacked(chain, most, device)
        size = self.cluster or _split_of_second(chain, depth)
        split, across = self.split, self.across or 1
        if not staged and split == 1 and not self.cluster and _is_deep(chain, size, depth):
            split = size
        cluster = size if split == 1 else self.cluster or 1
        beside = cluster * across
        side_by_side = _spread(device) // (beside * split) * beside
        share = -(-chain.n // max(1, side_by_side // row_tiles(chain, rows)))
        columns = self.columns or min(most, -(-share // 8) * 8)
        return replace(
            self,
            rows=rows,
            columns=columns,
            cluster=cluster,
            split=split,
            across=across,
            stacked=False,
        )

    def _stacked(self, chain: Chain, most: int, device: Device) -> TensorTiles:
        """Clusters along the rows of the intermediate, with tiles of at most so many columns."""
        cluster = self.cluster or 2
        across = self.across or stacked_across(chain, self.rows, most, cluster, device)
        columns = self.columns or stacked_columns(chain, self.rows, most, cluster, across, device)
        return replace(self, columns=columns, cluster=cluster, across=across)

    def of_second(self, sch: Any, chain: Chain, first: TensorTiles, device: Device) -> TensorTiles:
        """Choose the open sizes of a chain's second product.

        Its reduction is split over a cluster; but of a stacked chain only if all parts then find
        room at once. Where both `cluster` and `columns` are given, `split` is taken as it is.
        """
        # A tile of the second product waits for tiles of the first of as many rows.
        rows = self.rows or first.rows
        depth = row_bytes_depth(sch, chain.second)
        if self.cluster and self.columns:
            return replace(self, rows=rows, across=first.across)
        if first.stacked:
            split, columns = stacked_split(chain, rows, depth, first.cluster, first.across, device)
            cluster = 1 if split > 1 else first.cluster
            columns = self.columns or columns
            return replace(
                self,
                rows=rows,
                columns=columns,
                cluster=cluster,
                split=split,
                across=first.across,
            )
        split = self.split if self.split > 1 else max(first.cluster, first.split)
        across = first.across
        side_by_side = _spread(device) // (split * across) * across // row_tiles(chain, rows)
        share = -(-chain.l // max(1, side_by_side))
        columns = self.columns or min(widest(rows), -(-share // 16) * 16)
        return replace(self, rows=rows, columns=columns, cluster=1, split=split, across=across)


def _split_of_second(chain: Chain, depth: int) -> int:
    """CTAs that each have steps of the second product's reduction."""
    return next(size for size in (4, 2, 1) if divides_equally(chain.n, size, depth))


def _is_deep(chain: Chain, size: int, depth: int) -> bool:
    """Whether the first product's reduction is worth splitting over `size` CTAs."""
    deep = len(chain.first) == 1 and chain.k >= 4 * chain.n
    return deep and divides_equally(chain.k, size, depth)


def row_bytes_depth(sch: Any, product: Any, index: int = 0) -> int:
    """Elements of an operand of a product that fill a row of a tile."""
    dtype = ir.tvm.DataType(str(sch.get(product).reads[index].source.ty.dtype))
    return ROW_BYTES * 8 // int(dtype.bits)


def tile_rows(chain: Chain) -> int:
    """Rows of a CTA's tile, where the caller leaves them open."""
    return 128 if chain.m > 64 else 64


def tall_rows(chain: Chain, device: Device) -> int:
    """Rows of a CTA's tile where 256 may be chosen, which halve what two of 128 bring from L2.

    They are for wide gated chains of up to 256 rows, in clusters side by side: 114.5 instead of
    121.2 us for widths of 4096 and 11008. Of 512 rows they take longer: 202.9 instead of 195.6
    (docs/hopper-measured.md).
    """
    if len(chain.first) == 2 and 128 < chain.m <= 256 and is_wide(chain, 128, device):
        return 256
    return tile_rows(chain)


def _spread(device: Device) -> int:
    """CTAs that a kernel for few rows is spread over: 120 on the 132 SMs of an H100."""
    return device.resident_clusters(_CLUSTER) * _CLUSTER


def _columns(width: int, most: int) -> int:
    """Columns of a tile: the most, which use a tensor core best, but no more than there are."""
    return min(most, -(-width // 8) * 8)
