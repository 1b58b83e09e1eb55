"""Rule for a streaming function: rows to CTAs or clusters, segments to threads."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import AnyFunction, checked
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.markers import DSM_SCOPE

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


def planned(site: Site, derivation: Derivation, tiles: StreamTiles, _: bool) -> Any:
    """Write a cascade as a stream of threads, and bind it, in tiles of a plan."""
    return schedule_stream(streaming(site, derivation, tiles), tiles)
