"""Tiles of chains with several tiles of rows: a cluster's CTAs share the weights, not the rows."""

from __future__ import annotations

from crossfuse.blocks.chain import Chain
from crossfuse.hardware import Device
from crossfuse.planner.kernels.phase import widest
from crossfuse.planner.kernels.shape import divides_equally

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
