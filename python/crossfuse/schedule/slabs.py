"""Finds the `shared.dsm` buffers of a function, and the cluster axis that owns their slabs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import binds, function
from crossfuse.markers import DSM_SCOPE, MERGE, cluster_axis


@dataclass(frozen=True)
class SlabUse:
    """A block that accesses a `shared.dsm` buffer."""

    block: Any
    #: Whether it writes the buffer; a block that writes it may read its own slab as well.
    write: bool
    #: Cluster axes whose loops the accessed rank is bound to.
    axes: tuple[str, ...]


def slab_uses(sch: Any) -> dict[Any, list[SlabUse]]:
    """Find the uses of every `shared.dsm` buffer, in program order; records nothing.

    A buffer without uses has an empty list.
    """
    uses: dict[Any, list[SlabUse]] = {}
    blocks: list[Any] = []

    def allocate(block: Any) -> None:
        blocks.append(block)
        uses.update({each: [] for each in block.alloc_buffers if each.scope() == DSM_SCOPE})

    ir.walk(function(sch).body, (ir.SBlock, allocate))
    for block in blocks:
        written = [each.source for each in block.writes]
        for regions, write in ((block.writes, True), (block.reads, False)):
            for region in regions:
                again = not write and any(region.source.same_as(each) for each in written)
                if region.source in uses and not again:
                    axes = _rank_axes(sch, block, region.region[0].min)
                    uses[region.source].append(SlabUse(block, write, axes))
    return uses


def slab_axis(uses: list[SlabUse]) -> str | None:
    """The cluster axis whose CTAs own the slabs: that of the loop which fills them, or None."""
    return next((axis for use in uses if use.write for axis in use.axes), None)


def _rank_axes(sch: Any, block: Any, rank: Any) -> tuple[str, ...]:
    """Cluster axes of the loops that drive a block's rank index."""
    found: list[Any] = []
    ir.walk(function(sch).body, (ir.SBlockRealize, found.append))
    values = next(each.iter_values for each in found if each.block.same_as(block))
    bound = dict(zip((each.var for each in block.iter_vars), values, strict=True))
    expression = ir.substitute(rank, lambda var: bound.get(var, var))
    expression = ir.sym.Analyzer().simplify(expression)
    axes: list[str] = []
    sref = sch.get_sref(block).parent
    while sref is not None and isinstance(sref.stmt, ir.For):
        axis = cluster_axis(sref.stmt)
        # A loop over one CTA is no part of the index: simplification takes it out.
        alone = ir.constant(expression) == 0 and ir.constant(sref.stmt.extent) == 1
        if axis is not None and (alone or binds(sref.stmt.loop_var, expression)):
            axes.append(axis)
        sref = sref.parent
    return tuple(axes)


# Places the buffers of a scheduled function, and sizes them, as TVM does.

#: TVM's name of the pass that lowers reductions over threads.
_REDUCTIONS = "s_tir.LowerCrossThreadReduction"


def placement_passes() -> list[Any]:
    """TVM's passes from a scheduled function to opaque blocks with exact buffers.

    They are the beginning of TVM's `s_tir` pipeline.
    """
    s = ir.s_tir.transform
    return [
        s.CanonicalizeLoop(),
        s.LowerCrossThreadReduction(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.LiftThreadBinding(),
        s.ManifestSharedMemoryLocalStage(),
        s.CompactBufferAllocation(),
    ]


def compacted(func: Any) -> Any:
    """Give the buffers of a scheduled function their final places and shapes.

    The result is in opaque blocks, every allocation of the extent that its uses need. It takes a
    millisecond.
    """
    passes = placement_passes()
    if _merges(func):
        # TVM refuses merges of states over threads, which the lowering makes shuffles of. What they
        # allocate is the same without.
        passes = [each for each in passes if each.info.name != _REDUCTIONS]
    module = ir.tvm.ir.transform.Sequential(passes)(ir.IRModule({"main": func}))
    return module["main"]


def _merges(func: Any) -> bool:
    """Whether a function has blocks that merge states."""
    found: list[Any] = []
    ir.walk(func.body, (ir.SBlock, found.append))
    return any(MERGE in each.annotations for each in found)
