"""What a stream of tiles takes of a multiprocessor.

The lowering (`crossfuse.lower.hopper.stream.plan.kernel`) has the last word: it knows how many
arrays of scores an expression needs, where here one is assumed.
"""

from __future__ import annotations

from crossfuse.cascade.rewrite.tiled.sizes import WARPGROUP_ROWS, WIDE, CascadeTiles
from crossfuse.cascade.rewrite.tiled.work import TileWork
from crossfuse.hardware import Device

#: Registers of a thread for scores, weights and sums, by the number of multiplying warpgroups.
_REGISTERS = {1: 176, 2: 184, 3: 132}
#: Shared memory of barriers and of arithmetic that is kept in its place, in bytes, at most.
_REST = 1024
#: Stages of the ring at least.
_STAGES = 2


def sum_registers(work: TileWork, sizes: CascadeTiles) -> int:
    """Float32 registers of a thread: scores, their weights, and sums.

    Sums of more columns than a warpgroup holds are shared by two.
    """
    columns = min(sizes.columns, WIDE)
    return sizes.elements // 2 + sizes.elements // 4 + columns // 2


def registers_fit(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether a warpgroup has registers for a tile."""
    limit = _REGISTERS.get(sizes.rows // WARPGROUP_ROWS, 0)
    return sum_registers(work, sizes) <= limit


def at_once(tiles: CascadeTiles, device: Device) -> int:
    """Tiles of rows that a device works on at once, one CTA on a multiprocessor.

    Where a second kernel merges, parts of tiles, which wait for no others.
    """
    return tiles.share * device.resident_clusters(tiles.ctas_of_cluster)


def splits_axis(work: TileWork) -> bool:
    """Whether CTAs can share the axis: wide sums are in no registers to merge.

    Two warpgroups share them, apart from the rows whose states are merged.
    """
    return bool(work.depth) and 0 < work.columns <= WIDE


def steps_together(work: TileWork) -> bool:
    """Whether tiles of rows side by side go through the same elements, so that one load serves all.

    Under a causal mask each of them ends elsewhere.
    """
    return len({(first, behind) for _, first, behind in work.spans}) <= 1


def shared_size(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of shared memory of a CTA with as few stages as there can be."""
    boxes = sizes.rows * min(sizes.columns, 64) * work.item
    held = sizes.rows * sizes.depth * work.left if holds_left(work, sizes) else 0
    return held + boxes + _STAGES * step_bytes(work, sizes) + _REST


def step_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes that a step brings into a CTA: tiles of both right operands, and of loaded elements.

    Where a product's depth is cut, a step is one piece of it.
    """
    right = sizes.elements * sizes.depth * work.right
    loaded = not work.depth or not holds_left(work, sizes)
    left = sizes.rows * (sizes.depth or sizes.elements) * work.left if loaded else 0
    return right + value_bytes(work, sizes) + left


def value_bytes(work: TileWork, sizes: CascadeTiles) -> int:
    """Bytes of them that the second product takes alone."""
    return 0 if work.same else sizes.elements * sizes.columns * work.value


def holds_left(work: TileWork, sizes: CascadeTiles) -> bool:
    """Whether the left operand of the first product stays in shared memory.

    Parameters
    ----------
    work : TileWork
        The cascade.
    sizes : CascadeTiles
        Tiles, all chosen.

    Returns
    -------
    bool
        False where one product makes whole rows: both its operands are brought together.
    """
    all_depth = bool(work.depth) and sizes.depth == work.depth
    return all_depth and not sizes.makes_whole_rows(work.length)
