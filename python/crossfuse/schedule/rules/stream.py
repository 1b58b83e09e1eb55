"""Rules for streaming functions: rows, rows that are added up, and tiles between two products."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import AnyFunction, checked
from crossfuse.cascade.rewrite.streaming import ADDED, added_tiles, streaming, summing
from crossfuse.cascade.rewrite.tiled.tile_context import COLUMNS, DEPTH, PARTS, ROWS, STEPS
from crossfuse.cascade.rewrite.tiled.tiled import MERGE, TILE, tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles, SummingTiles
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.markers import DSM_SCOPE, STAGES, STREAM

#: Blocks of a streaming function, in program order, and those that only clusters have.
BLOCKS = ("segment", "merge", "push", "fold", "outputs")
OF_CLUSTERS = ("push", "fold")
#: Dimensions of a number of each thread: row, CTA, thread.
_OF_THREAD = 3


@checked
def schedule_stream(func: AnyFunction, tiles: StreamTiles) -> Any:
    """Bind a streaming function to the GPU.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        As `crossfuse.cascade.rewrite.streaming.streaming` writes it.
    tiles : StreamTiles
        The sizes that it was written with.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.cascade.rewrite.streaming import streaming
    >>> from crossfuse.workload import cascade_build, cascades
    >>> (site,) = detect(cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=1024")))
    >>> tiles = StreamTiles()
    >>> sch = schedule_stream(streaming(site, derive(site.cascade), tiles), tiles)
    >>> row, threads = sch.get_loops(sch.get_sblock("segment"))[:2]
    >>> int(sch.get(row).extent), str(sch.get(threads).thread_binding.thread_tag)
    (4, 'threadIdx.x')
    """
    sch = ir.Schedule(func)
    bind_stream(sch, tiles)
    return sch


def bind_stream(sch: Any, tiles: StreamTiles, prefix: str = "") -> None:
    """Bind the blocks of a stream written with these sizes, alone in their function or not.

    See `schedule_stream`. Names of blocks may begin with a `prefix`.
    """
    names = [each for each in BLOCKS if each not in OF_CLUSTERS or tiles.cluster > 1]
    blocks = {name: sch.get_sblock(f"{prefix}{name}") for name in names}
    row = sch.get_loops(blocks["segment"])[0]
    if tiles.rows > 1:
        row, side = sch.split(row, [None, tiles.rows])
        sch.bind(side, "threadIdx.y")
    sch.bind(row, "blockIdx.x")
    for block in blocks.values():
        loops = list(sch.get_loops(block))[2 if tiles.rows > 1 else 1 :]
        if tiles.cluster > 1:
            sch.cluster_bind(loops.pop(0))
        sch.bind(loops[0], "threadIdx.x")
    place_stream(sch, blocks, tiles)


def place_stream(sch: Any, blocks: dict[str, Any], tiles: StreamTiles) -> None:
    """Put states into registers, messages between CTAs into slabs, elements where they stay."""
    states = len(sch.get(blocks["merge"]).writes)
    for number, written in enumerate(sch.get(blocks["segment"]).writes):
        # Elements have a step and a place in it beside row, CTA and thread.
        kept = len(written.region) > _OF_THREAD and tiles.resident == "shared"
        shared = DSM_SCOPE if tiles.cluster > 1 else "shared.dyn"
        sch.set_scope(blocks["segment"], number, shared if kept else "local")
    for number in range(states):
        sch.set_scope(blocks["merge"], number, "local")
        if tiles.cluster > 1:
            sch.set_scope(blocks["push"], number, DSM_SCOPE)
            sch.set_scope(blocks["fold"], number, "local")


def planned_stream(site: Site, derivation: Derivation, tiles: StreamTiles, _: bool) -> Any:
    """Write a cascade as a stream of threads, and bind it, in tiles of a plan."""
    return schedule_stream(streaming(site, derivation, tiles), tiles)


# Rule for a stream whose rows are added up: groups of rows to CTAs, then columns to threads.


#: Blocks of the rows, in program order.
SUMMED_BLOCKS = ("segment", "merge", "outputs", "sums", "partial")


@checked
def schedule_summing(func: AnyFunction, tiles: SummingTiles) -> Any:
    """Bind a function of rows that are added up: a kernel of rows, and one of each sum.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        As `crossfuse.cascade.rewrite.streaming.summing` writes it.
    tiles : SummingTiles
        The sizes that it was written with.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Examples
    --------
    >>> from crossfuse.autodiff import gradients
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.rewrite.rows_first import sites_of
    >>> from crossfuse.cascade.rewrite.streaming import summing
    >>> from crossfuse.workload import cascade_build, cascades
    >>> forward = cascade_build.prim_func(cascades.parse("rmsnorm:rows=8,cols=512"))
    >>> (site,) = sites_of(gradients(forward, wrt=["x", "weight"]).function)
    >>> tiles = SummingTiles(threads=32, unroll=1, groups=4)
    >>> sch = schedule_summing(summing(site, derive(site.cascade), tiles), tiles)
    >>> [int(sch.get(each).extent) for each in sch.get_loops(sch.get_sblock("segment"))]
    [4, 2, 32]
    """
    sch = ir.Schedule(func)
    blocks = {name: sch.get_sblock(name) for name in SUMMED_BLOCKS}
    partial = sch.get(blocks["partial"]).writes
    group, turn = sch.get_loops(blocks["segment"])[:2]
    sch.bind(group, "blockIdx.x")
    for name, block in blocks.items():
        outer = 1 if name == "partial" else 2
        sch.bind(sch.get_loops(block)[outer], "threadIdx.x")
    place_stream(sch, blocks, tiles.stream)
    for name in ("outputs", "sums"):
        for number, written in enumerate(sch.get(blocks[name]).writes):
            if written.source in sch.get(sch.get_sblock("root")).alloc_buffers:
                sch.set_scope(blocks[name], number, "local")
    sch.decompose_reduction(blocks["sums"], turn)
    for number in range(len(partial)):
        prefix = ADDED.format(number)
        columns = int(sch.get(sch.get_loops(sch.get_sblock(f"{prefix}segment"))[0]).extent)
        bind_stream(sch, added_tiles(columns, tiles.groups), prefix)
    return sch


def planned_summing(site: Site, derivation: Derivation, tiles: SummingTiles, _: bool) -> Any:
    """Write both streams of rows that are added up, and bind them, in tiles of a plan."""
    return schedule_summing(summing(site, derivation, tiles), tiles)


# Rule for a cascade in tile form: tiles to CTAs, the loop over tiles of the axis to a stream.


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


def planned_cascade_tiles(site: Site, derivation: Derivation, tiles: CascadeTiles, _: bool) -> Any:
    """Write a stream of tiles, and bind it, in tiles of a plan."""
    return schedule_cascade_tiles(site, derivation, tiles)
