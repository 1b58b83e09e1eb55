"""Rule for a stream whose rows are added up: groups of rows to CTAs, then columns to threads."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.calls import AnyFunction, checked
from crossfuse.cascade.rewrite.summing import ADDED, added_tiles, summing
from crossfuse.cascade.rewrite.tiles import SummingTiles
from crossfuse.cascade.spec import Derivation, Site
from crossfuse.schedule.rules.stream import bind_stream, place_stream

#: Blocks of the rows, in program order.
BLOCKS = ("segment", "merge", "outputs", "sums", "partial")


@checked
def schedule_summing(func: AnyFunction, tiles: SummingTiles) -> Any:
    """Bind a function of rows that are added up: a kernel of rows, and one of each sum.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        As `crossfuse.cascade.rewrite.summing.summing` writes it.
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
    >>> from crossfuse.cascade.rewrite.summing import summing
    >>> from crossfuse.workload import cascade_build, cascades
    >>> forward = cascade_build.prim_func(cascades.parse("rmsnorm:rows=8,cols=512"))
    >>> (site,) = sites_of(gradients(forward, wrt=["x", "weight"]).function)
    >>> tiles = SummingTiles(threads=32, unroll=1, groups=4)
    >>> sch = schedule_summing(summing(site, derive(site.cascade), tiles), tiles)
    >>> [int(sch.get(each).extent) for each in sch.get_loops(sch.get_sblock("segment"))]
    [4, 2, 32]
    """
    sch = ir.Schedule(func)
    blocks = {name: sch.get_sblock(name) for name in BLOCKS}
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


def planned(site: Site, derivation: Derivation, tiles: SummingTiles, _: bool) -> Any:
    """Write both streams of rows that are added up, and bind them, in tiles of a plan."""
    return schedule_summing(summing(site, derivation, tiles), tiles)
