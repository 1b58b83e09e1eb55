"""Rule for a cascade in tile form: tiles to CTAs, the loop over tiles of the axis to a stream."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import AnyFunction, checked
from crossfuse.cascade.rewrite.tiled.tile_context import COLUMNS, DEPTH, PARTS, ROWS, STEPS
from crossfuse.cascade.rewrite.tiled.tiled import MERGE, TILE, tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.markers import STAGES, STREAM


@checked
def schedule_cascade_tiles(
    site: Site, derivation: Derivation, tiles: CascadeTiles | None = None
) -> Any:
    """Schedule a cascade with products: write it in tile form, and bind it to the GPU.

    Tiles of rows and columns go over the grid along x, tiles of the same columns side by side;
    other rows along y. CTAs that share the axis of a tile are a cluster along x, and so are those
    with tiles of rows side by side (`CascadeTiles.share`). The loop over tiles of the axis is
    annotated as a stream. Where a second kernel merges (`CascadeTiles.merge`) CTAs that share an
    axis go over the grid along z, and the merge has a grid of its own::

        for bh in blockIdx.y:
            for q in blockIdx.x:
                block tile:
                    for t in range(tiles that are needed):       # crossfuse.stream

    Parameters
    ----------
    site : Site
        The cascade in its function.
    derivation : Derivation
        How it streams.
    tiles : CascadeTiles | None
        Sizes; None chooses them.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace, which replays on `crossfuse.cascade.rewrite.tiled.tiled` of
        the same arguments.

    Raises
    ------
    CascadeRefused
        See `crossfuse.cascade.rewrite.tiled.tiled`.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> spec = cascades.parse("attention:batch=1,heads=2,q_len=64,kv_len=128,head_dim=64")
    >>> (site,) = detect(cascade_build.prim_func(spec))
    >>> sch = schedule_cascade_tiles(site, derive(site.cascade))
    >>> [int(sch.get(each).extent) for each in sch.get_loops(sch.get_sblock("tile"))]
    [2, 1]
    """
    given = tiles or CascadeTiles()
    return schedule_tiled(tiled(site, derivation, given), given)


@checked
def schedule_tiled(func: AnyFunction, tiles: CascadeTiles) -> Any:
    """Schedule what `crossfuse.cascade.rewrite.tiled.tiled` wrote; see `schedule_cascade_tiles`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In tile form.
    tiles : CascadeTiles
        Its sizes.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.workload import cascade_build, cascades
    >>> spec = cascades.parse("attention:batch=1,heads=2,q_len=64,kv_len=128,head_dim=64")
    >>> (site,) = detect(cascade_build.prim_func(spec))
    >>> sizes = CascadeTiles()
    >>> sch = schedule_tiled(tiled(site, derive(site.cascade), sizes), sizes)
    >>> len(sch.get_loops(sch.get_sblock("tile")))
    2
    """
    sch = ir.Schedule(func)
    bind_tiles(sch, tiles)
    return sch


def bind_tiles(sch: Any, tiles: CascadeTiles) -> None:
    """Bind a function that `tiled` wrote with these sizes; annotate its stream."""
    part = _bind_grid(sch, TILE, tiles.share)
    if part is not None and tiles.in_memory:
        sch.bind(part, "blockIdx.z")
        _bind_grid(sch, MERGE)
    elif part is not None:
        sch.cluster_bind(part)
        sch.cluster_bind(sch.get_loops(sch.get_sblock(MERGE))[-1])
    sch.annotate(_loop(sch, STEPS), STREAM, tiles.stages)
    if _node(sch, DEPTH) is not None:
        sch.annotate(_loop(sch, DEPTH), STAGES, 0)


def _bind_grid(sch: Any, block: str, share: int = 1) -> Any:
    """Bind the tiles of a block; returns the loop over CTAs that share one, or None."""
    loops = {
        str(sch.get(each).loop_var.name): each for each in sch.get_loops(sch.get_sblock(block))
    }
    part = loops.pop(PARTS, None)
    across = [loops.pop(name) for name in (COLUMNS, ROWS)]
    if share > 1:
        across[1], beside = sch.split(across[1], [None, share])
        sch.cluster_bind(beside)
    sch.bind(sch.fuse(*across), "blockIdx.x")
    if loops:
        sch.bind(sch.fuse(*loops.values()), "blockIdx.y")
    return part


def _loop(sch: Any, name: str) -> Any:
    """The loop of a name inside a tile's block, as a random variable."""
    node = _node(sch, name)
    blocks: list[Any] = []
    ir.walk(node, (ir.SBlock, blocks.append))
    found = sch.get_loops(sch.get_sblock(str(blocks[0].name_hint)))
    return next(each for each in found if sch.get(each).same_as(node))


def _node(sch: Any, name: str) -> Any:
    """The first loop of a name; None if there is none."""
    found: list[Any] = []

    def visit(loop: Any) -> None:
        if str(loop.loop_var.name) == name:
            found.append(loop)

    ir.walk(sch.get(sch.get_sblock("root")).body, (ir.For, visit))
    return found[0] if found else None


def planned(site: Site, derivation: Derivation, tiles: CascadeTiles, _: bool) -> Any:
    """Write a stream of tiles, and bind it, in tiles of a plan."""
    return schedule_cascade_tiles(site, derivation, tiles)
