"""Where a kernel of a cascade keeps what outlives a sweep or a CTA, and what it takes."""

from __future__ import annotations

from crossfuse.cascade.rewrite.tiled.sizes import WARPGROUP_ROWS, CascadeTiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import WARP, WARPGROUP, Device
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.kernel import Tiles
from crossfuse.planner.cascade.rows_cost import rows_memory
from crossfuse.planner.cascade.rows_space import RowsTiles
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.stream_limits import ctas, registers, shared_bytes
from crossfuse.planner.cascade.tile_limits import at_once, shared_size, sum_registers
from crossfuse.planner.cascade.tile_steps import steps_of
from crossfuse.planner.kernels.resources import resources

#: Places of elements that outputs need again, by `StreamTiles.resident`.
_RESIDENT = {"registers": "registers", "shared": "shared memory", "none": "L2"}


def place_of(shape: CascadeShape, tiles: Tiles) -> str:
    """Where states and elements are: words that tell kinds of kernels apart.

    States of a CTA are in registers, those of a cluster go through DSM, those that a second kernel
    merges through global memory. Elements that outputs over
    the axis need again are in registers or shared memory, or come from L2 as far as it has them.
    """
    if isinstance(tiles, RowsTiles):
        return "chunks of rows in L2" if tiles.chunk else "rows in L2"
    state = "DSM" if tiles.cluster > 1 else "registers"
    if isinstance(tiles, CascadeTiles) and tiles.in_memory:
        state = "global memory"
    if isinstance(tiles, StreamTiles) and isinstance(shape.work, Work) and shape.work.outputs:
        return f"states in {state}, elements in {_RESIDENT[tiles.resident]}"
    return f"states in {state}"


def taken(shape: CascadeShape, tiles: Tiles, device: Device) -> Taken:
    """What a kernel takes of the device."""
    if isinstance(tiles, RowsTiles):
        return _taken_by_rows(shape, tiles, device)
    size = tiles.cluster
    if isinstance(tiles, StreamTiles):
        assert isinstance(shape.work, Work)
        groups, side = -(-shape.work.rows // tiles.rows), ctas(shape.work, tiles, device)
        room = side * device.resident_clusters(size)
        threads = max(WARP, tiles.threads * tiles.rows)
        return Taken(
            groups * size,
            size,
            threads,
            side,
            registers(shape.work, tiles),
            shared_bytes(shape.work, tiles),
            round(max(1.0, groups / room), 2),
        )
    assert not isinstance(shape.work, Work)
    found = steps_of(shape.work, tiles)
    return Taken(
        found.places * size,
        tiles.ctas_of_cluster,
        # One warpgroup more loads.
        WARPGROUP * (found.sizes.rows // WARPGROUP_ROWS + 1),
        1,
        sum_registers(shape.work, found.sizes),
        shared_size(shape.work, found.sizes),
        round(max(1.0, found.places * tiles.alone / at_once(tiles, device)), 2),
    )


def _taken_by_rows(shape: CascadeShape, tiles: RowsTiles, device: Device) -> Taken:
    """What the product takes; the warps that make rows are there anyway."""
    assert shape.product is not None
    (found,) = resources(tiles.kernel, shape.product.shape, device)
    (phase,) = tiles.kernel.phases(shape.product.shape)
    waves = int(phase.tiles) * found.cluster / found.busy
    return Taken(
        found.ctas,
        found.cluster,
        found.threads,
        1,
        found.sums,
        int(rows_memory(shape.product, tiles.kernel, device).size),
        round(max(1.0, waves), 2),
    )
