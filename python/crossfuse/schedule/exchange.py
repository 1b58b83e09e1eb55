"""The all-exchange of `dsm_reduce`, after which every CTA has the whole tile, and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    bindings,
    binds,
    function,
    name_of,
    position,
    read_index,
    realize,
    written_buffer,
)
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import DSM_SCOPE, MAX_CLUSTER, MERGE, cluster_axis
from crossfuse.schedule.primitive import cluster_bind, refusing

if TYPE_CHECKING:
    from crossfuse.schedule.dsm_reduce import Reduction

# Finds the `shared.dsm` buffers of a function, and the cluster axis that owns their slabs.


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


# The exchange.

# Declares read regions of a block that are larger than one of its iterations touches.

_READ = 0


def declare_read(
    sch: Any, block: Any, index: int, region: Callable[..., list[tuple[Any, Any]]]
) -> None:
    """Declare the region of a buffer that a block reads, as a recorded instruction.

    ``Schedule.annotate_buffer_access`` does the same, but wants as many ranges as the block has
    iteration variables, which a reduction block has more of than its operand has dimensions.
    `index` is that of the read; `region` takes the block's iteration variables and returns (begin,
    end) for each buffer dimension.
    """
    variables = [each.var for each in sch.get(block).iter_vars]
    bounds = [bound for pair in region(*variables) for bound in pair]
    mapping = ir.tirx.IndexMap(variables, bounds, None)
    annotate = ir.s_tir.schedule._ffi_api.ScheduleAnnotateBufferAccess
    annotate(sch, block, index, _READ, mapping)


def check_exchange(sch: Any, rule: str, block: Any, reduction: Reduction) -> None:
    """Refuse a reduction that all-exchange cannot place.

    That is one whose output tile does not divide into slices, whose intermediate has no consumer in
    a cluster-bound loop of the axis, or whose ranks have unequal shares of the reduction.
    """
    if reduction.output:
        _slice_factors(rule, reduction)
        return
    if _consumer_nest(sch, block, reduction.axis) is None:
        raise refuse(
            ScheduleRefused,
            rule,
            reduction.where,
            found=f"no consumer in a loop bound to cluster axis {reduction.axis}",
            limit="all-exchange leaves the tile with the CTAs that consume it",
            instead="cluster_bind a loop of the consumer first, or use scatter=True",
        )
    _check_unmasked(sch, rule, block, reduction)
    if not reduction.exact:
        # compute_at drops the mask of the partial tiles and would read past the end.
        raise refuse(
            ScheduleRefused,
            rule,
            reduction.where,
            found=f"{reduction.count} CTAs with unequal shares of the reduction",
            limit="with scatter=False on an intermediate, splits that divide the reduction",
            instead="choose a cluster size and inner splits that divide it, or use scatter=True",
        )


def _check_unmasked(sch: Any, rule: str, block: Any, reduction: Reduction) -> None:
    """Refuse a consumer that masks iterations of its slice: TVM would combine a larger tile."""
    consumer, nest = _consumer_nest(sch, block, reduction.axis)
    if reduction.sampled or not _sliced(sch, consumer, block, nest):
        return
    loops, depth = position(sch, rule, consumer, nest)
    inner = [sch.get(each).loop_var for each in loops[depth:]]
    for term in ir.terms(realize(sch, consumer).predicate):
        used = list(ir.variables(term))
        if used and all(any(var.same_as(each) for each in inner) for var in used):
            raise refuse(
                ScheduleRefused,
                rule,
                f"{reduction.where}, consumer {name_of(sch, consumer)}",
                found=f"a mask within the slice of a CTA: {term}",
                limit="a consumer whose loops cover its slice exactly",
                instead="call dsm_reduce before the consumer's slice is split for threads, or "
                "split it by factors that divide it",
            )


def exchange_output(sch: Any, block: Any, tile_loop: Any, reduction: Reduction) -> None:
    """Let every CTA combine the whole tile of an output and store its own slice of it."""
    store = sch.cache_write(block, 0, "shared")
    if tile_loop is not None:
        sch.reverse_compute_at(store, tile_loop, preserve_unit_loops=True)
    slices = _slice(sch, list(sch.get_loops(store))[reduction.depth :], reduction)
    cluster_bind(sch, slices, reduction.axis)
    _declare_whole_tile(sch, store, block, slices, reduction)
    sch.compute_at(block, slices, preserve_unit_loops=True)


def exchange_intermediate(
    sch: Any, rule: str, partial: Any, block: Any, reduction: Reduction
) -> None:
    """Let every CTA combine the whole tile where its consumer runs."""
    consumer, nest = _consumer_nest(sch, block, reduction.axis)
    with refusing(
        rule,
        reduction.where,
        limit="a tile that can be combined at the consumer's cluster-bound loop",
        instead=f"bring all consumers of the block under loop '{sch.get(nest).loop_var.name}', "
        "and bind their loops to threads afterwards",
    ):
        sch.set_scope(block, 0, "shared")
        _declare_whole_tile(sch, consumer, block, nest, reduction)
        sch.compute_at(block, nest, preserve_unit_loops=True)
        loops, depth = position(sch, rule, consumer, nest)
        if depth:
            sch.compute_at(partial, loops[depth - 1], preserve_unit_loops=True)


def check_whole_tile(sch: Any, rule: str, block: Any, reduction: Reduction) -> None:
    """Refuse, after the change, a tile that TVM would place differently in each CTA.

    Each CTA allocates the part of the tile that its loops need. Where slices begin in the middle of
    a row TVM bounds that region by an expression of the rank, of the wrong size.
    """
    if reduction.sampled:
        return
    name = str(written_buffer(sch, block).name)
    moved: list[str] = []

    def visit(loop: Any) -> None:
        if cluster_axis(loop) != reduction.axis or ir.constant(loop.extent) == 1:
            return
        stores: list[Any] = []
        ir.walk(loop.body, (ir.BufferStore, stores.append))
        for store in stores:
            if str(store.buffer.name) == name and any(
                binds(loop.loop_var, index) for index in store.indices
            ):
                moved.append(str(loop.loop_var.name))

    ir.walk(compacted(function(sch, block)).body, (ir.For, visit))
    if moved:
        raise refuse(
            ScheduleRefused,
            rule,
            reduction.where,
            found=f"a tile whose place depends on loop '{moved[0]}'",
            limit="the same tile in every CTA: slices that begin and end with a row or column",
            instead="bind a part of one loop over rows or columns of the tile instead of a part "
            "of a fused loop, or choose a tile with whole rows in each slice",
        )


def _slice(sch: Any, tile: list[Any], reduction: Reduction) -> Any:
    """Split the loops of a tile into slices, one for each CTA, and the elements of a slice."""
    outer: list[Any] = []
    for dimension, factor in _slice_factors("dsm_reduce", reduction).items():
        if dimension is None:
            tile = [sch.fuse(*tile)] if len(tile) > 1 else tile
        part, tile[dimension or 0] = sch.split(tile[dimension or 0], [factor, None])
        outer.append(part)
    sch.reorder(*outer, *tile)
    if len(tile) > 1:
        sch.fuse(*tile)
    return sch.fuse(*outer) if len(outer) > 1 else outer[0]


def _slice_factors(rule: str, reduction: Reduction) -> dict[int | None, Any]:
    """The number of parts of each tile dimension, so that there is one slice for each CTA.

    Slices are boxes, because TVM bounds others too loosely, see `check_whole_tile`. A tile of
    sampled size is cut as one row of elements (dimension None), which every mutation can be.
    """
    extents, count = reduction.extents, reduction.count
    if reduction.sampled and reduction.elements % count == 0:
        return {None: reduction.ranks}
    fitting = {
        dimension: [n for n in range(1, MAX_CLUSTER + 1) if extent % n == 0]
        for dimension, extent in enumerate(extents)
    }
    whole = [dimension for dimension, sizes in fitting.items() if count in sizes]
    if whole and not reduction.sampled:
        # Of a sampled cluster size, the dimension that most of the other sizes divide too.
        fixed = isinstance(reduction.ranks, int)
        best = whole[0] if fixed else max(whole, key=lambda each: len(fitting[each]))
        return {best: reduction.ranks}
    boxes = _boxes(extents, count)
    if boxes and isinstance(reduction.ranks, int) and not reduction.sampled:
        return boxes
    sizes = sorted({size for each in fitting.values() for size in each})
    raise refuse(
        ScheduleRefused,
        rule,
        reduction.where,
        found=f"a tile of {' x '.join(map(str, extents))} for {count} CTAs",
        limit="with scatter=False, a tile that divides into one slice a CTA",
        instead="choose a tile with an extent that the cluster size divides, a cluster size of "
        f"{', '.join(map(str, sizes))}, or scatter=True",
    )


def _boxes(extents: tuple[int, ...], count: int) -> dict[int | None, Any]:
    """Factors of several dimensions whose product is `count`; empty if there are none."""
    factors: dict[int | None, Any] = {}
    for dimension, extent in enumerate(extents):
        part = gcd(count, extent)
        if part > 1:
            factors[dimension] = part
            count //= part
    return factors if count == 1 else {}


def _consumer_nest(sch: Any, block: Any, axis: str) -> Any:
    """A consumer of `block` and its loop on a cluster axis, or None."""
    for consumer in sch.get_consumers(block):
        for loop in sch.get_loops(consumer):
            if cluster_axis(sch.get(loop)) == axis:
                return consumer, loop
    return None


def _sliced(sch: Any, consumer: Any, block: Any, nest: Any) -> list[int]:
    """Iteration variables of `consumer` that index the tile, if loop `nest` slices the tile."""
    region = sch.get(consumer).reads[read_index(sch, consumer, written_buffer(sch, block))].region
    iterators = bindings(sch, consumer)
    axes = [
        axis
        for extent in region
        for axis, (each, _) in enumerate(iterators)
        if each.var.same_as(extent.min)
    ]
    variable = sch.get(nest).loop_var
    sliced = any(binds(variable, iterators[axis][1]) for axis in axes)
    return axes if sliced and len(axes) == len(region) else []


def _declare_whole_tile(
    sch: Any, consumer: Any, block: Any, nest: Any, reduction: Reduction
) -> None:
    """Let `consumer`, of which each CTA runs a slice, read the whole tile.

    ``compute_at`` recomputes the region that the consumer reads, which would be just the slice. A
    tile of sampled size stays so: a declared region cannot name random variables.
    """
    axes = _sliced(sch, consumer, block, nest)
    if reduction.sampled or not axes:
        return
    index = read_index(sch, consumer, written_buffer(sch, block))

    def whole_tile(*variables: Any) -> list[tuple[Any, Any]]:
        starts = [
            variables[axis] // extent * extent
            for axis, extent in zip(axes, reduction.extents, strict=True)
        ]
        return [(start, start + n) for start, n in zip(starts, reduction.extents, strict=True)]

    declare_read(sch, consumer, index, whole_tile)
