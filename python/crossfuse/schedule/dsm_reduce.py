"""`dsm_reduce`: a reduction is split over the CTAs of a cluster and combined through DSM."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.schedule.cluster_bind import cluster_bind
from crossfuse.schedule.extents import symbolic_extent
from crossfuse.schedule.facts import (
    bindings,
    binds,
    cluster_loops,
    combiner,
    constant_extent,
    function,
    is_reduction,
    name_of,
    position,
    reason,
    span,
)
from crossfuse.schedule.markers import (
    DSM_DTYPES,
    DSM_REDUCE,
    DSM_SCOPE,
    MAX_CLUSTER,
    cluster_axis,
)

RULE = "dsm_reduce"


def dsm_reduce(sch: Any, block: Any, loop: Any, *, scatter: bool = True) -> Any:
    """Split a reduction over the CTAs of a cluster and combine the partial tiles through DSM.

    `loop` is the part of the reduction that becomes the rank; the loops outside it walk over
    tiles, the loops inside it are one CTA's work. Before, with ``k0`` of extent 4::

        for i0, j0:                              # tiles
            for k0 in range(4):                  # <- loop
                for k1, i1, j1:  C[i, j] += A[i, k] * B[k, j]

    After ``sch.dsm_reduce(C, k0)``, each CTA keeps a quarter of the tile (reduce-scatter)::

        for i0, j0:
            for k0 in cluster(4):                # P: shared.dsm, slab k0 in CTA k0
                for k1, i1, j1:  P[k0, i, j] += A[i, k] * B[k, j]
            for z in cluster(4):                 # CTA z combines quarter z of the tile
                for e, r:  C[e] += P[r, e]

    After ``sch.dsm_reduce(C, k0, scatter=False)``, every CTA has the whole tile (all-exchange)::

        for i0, j0:
            for k0 in cluster(4):  P[k0, ...] = ...
            for z in cluster(4):
                for r, i1, j1:  S[i, j] += P[r, i, j]   # S: this CTA's own shared memory
                for e:  C[e] = S[e]                     # quarter z of the tile

    If `block` writes an intermediate, all-exchange stores no tile itself: the combination moves
    into the cluster-bound loop of the consumer, which finds the whole tile in its CTA.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.dsm_reduce(block, loop, scatter=...)``.
    block : SBlockRV
        A reduction by sum, product, max or min, not yet decomposed. Afterwards it combines.
    loop : LoopRV
        A serial reduction loop of the block, extent 1 to 16.
    scatter : bool
        True: each CTA ends with its own slice of the tile. False: with all of it.

    Returns
    -------
    SBlockRV
        The block of the partial tiles. Its rank loop is bound to cluster axis x, and so is the
        slice loop of `block`; the loops inside both are serial, to be bound to threads.

    Raises
    ------
    ScheduleRefused
        If the loop is no reduction loop of the block or has the wrong extent, if the reduction
        cannot be split, if the element type has no DSM access, if a slab exceeds the shared
        memory of a CTA, or, with ``scatter=False``, if no consumer is cluster-bound.

    Notes
    -----
    Composed of ``rfactor``, ``set_scope``, ``reverse_compute_at`` or ``compute_at``, ``fuse``,
    ``split``, ``reorder`` and `cluster_bind`, all recorded. Partial sums are combined in rank
    order, so results are bitwise repeatable.
    """
    subject = _check(sch, block, loop)
    if not scatter:
        _check_exchange(sch, block, loop, subject)
    ranks = symbolic_extent(sch, loop)
    try:
        partial = sch.rfactor(loop, 0)
    except ir.ScheduleError as error:
        raise refuse(
            ScheduleRefused,
            RULE,
            subject.where,
            found=reason(error),
            limit="a complete reduction block alone in its loops",
            instead="call dsm_reduce before decompose_reduction and before other blocks are "
            "moved into the loops of this one",
        ) from error
    sch.set_scope(partial, 0, DSM_SCOPE)
    sch.annotate(block, DSM_REDUCE, "scatter" if scatter else "all-exchange")
    if not scatter and not subject.output:
        _exchange_intermediate(sch, partial, block, subject)
        return partial
    loops = sch.get_loops(partial)
    cluster_bind(sch, loops[subject.depth])
    tile_loop = loops[subject.depth - 1] if subject.depth else None
    if tile_loop is not None:
        sch.reverse_compute_at(block, tile_loop, preserve_unit_loops=True)
    if scatter:
        _slice(sch, block, subject.depth, ranks)
    else:
        _exchange_output(sch, block, tile_loop, subject, ranks)
    return partial


@dataclass(frozen=True)
class _Subject:
    """What `dsm_reduce` learned about its block before changing anything."""

    where: str
    depth: int
    output: bool
    tile: tuple[Any, ...]
    elements: int


def _check(sch: Any, block: Any, loop: Any) -> _Subject:
    loops, depth = position(sch, RULE, block, loop)
    where = f"{name_of(sch, block)}, {name_of(sch, loop)}"
    if combiner(sch, block) is None:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found="a block without one initialised sum, product, max or min",
            limit="a reduction by sum, product, max or min that is not decomposed",
            instead="call dsm_reduce on the reduction block itself, before decompose_reduction",
        )
    bound = bindings(sch, block)
    node = sch.get(loop)
    if not all(is_reduction(var) for var, value in bound if binds(node.loop_var, value)):
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found="a loop over output elements",
            limit="a reduction loop",
            instead="split a reduction loop of the block and pass the part that becomes the rank; "
            "for a loop over output elements use cluster_bind",
        )
    extent = constant_extent(sch, RULE, loop)
    if not 1 <= extent <= MAX_CLUSTER or int(node.kind) != int(ir.ForKind.SERIAL):
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"extent {extent}"
            if int(node.kind) == int(ir.ForKind.SERIAL)
            else "a loop that is already bound",
            limit=f"a serial loop of extent 1 to {MAX_CLUSTER}, one iteration a CTA",
            instead="split the reduction loop by the number of CTAs and pass that part",
        )
    for other in cluster_loops(function(sch)):
        if other.axis == "x" and other.extent != extent:
            raise refuse(
                ScheduleRefused,
                RULE,
                where,
                found=f"extent {extent}",
                limit=f"extent {other.extent}, as cluster-bound loop '{other.name}' has",
                instead="split the reduction loop by the cluster size in use",
            )
    inner = [sch.get(each) for each in loops[depth + 1 :]]
    spatial = [value for var, value in bound if not is_reduction(var)]
    extents = [span(value, inner) for value in spatial]
    _check_slab(sch, block, where, extents)
    tile = _symbolic_tile(sch, loops[depth + 1 :], spatial, extents)
    return _Subject(where, depth, _is_output(sch, block), tile, prod(extents))


def _check_slab(sch: Any, block: Any, where: str, extents: list[int]) -> None:
    buffer = sch.get(block).writes[0].source
    dtype = str(buffer.ty.dtype)
    if dtype not in DSM_DTYPES:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"element type {dtype}",
            limit=", ".join(DSM_DTYPES),
            instead="reduce in one of these types and cast afterwards",
        )
    size = ir.tvm.DataType(dtype).bits // 8
    for extent in extents:
        size *= extent
    if size > MAX_SHARED_BYTES:
        tile = " x ".join(str(extent) for extent in extents)
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"a partial tile of {tile} {dtype}, {size} bytes",
            limit=f"{MAX_SHARED_BYTES} bytes of shared memory in a CTA",
            instead="split the output loops and reorder them outside this loop, so that a "
            "smaller tile is reduced at a time",
        )


def _is_output(sch: Any, block: Any) -> bool:
    """Whether the block writes a parameter of the function."""
    written = sch.get(block).writes[0].source
    return any(buffer.same_as(written) for buffer in function(sch).params)


def _symbolic_tile(
    sch: Any, inner: list[Any], spatial: list[Any], extents: list[int]
) -> tuple[Any, ...]:
    """Tile extents by output dimension, as random variables where one loop spans the dimension."""
    tile: list[Any] = []
    for value, extent in zip(spatial, extents, strict=True):
        spanning = [each for each in inner if binds(sch.get(each).loop_var, value)]
        tile.append(symbolic_extent(sch, spanning[0]) if len(spanning) == 1 else extent)
    return tuple(tile)


def _slice(sch: Any, block: Any, depth: int, ranks: Any) -> Any:
    """Give each CTA one slice of the tile; return the cluster-bound loop."""
    tile = list(sch.get_loops(block))[depth:]
    bound = bindings(sch, block)
    reduction = [var for var, _ in bound if is_reduction(var)]
    rank = [each for each in tile if _over(sch, each, bound, reduction)]
    rest = [each for each in tile if not any(each is taken for taken in rank)]
    flat = sch.fuse(*rest) if len(rest) > 1 else rest[0]
    slice_loop, element = sch.split(flat, [ranks, None])
    sch.reorder(slice_loop, element, *rank)
    cluster_bind(sch, slice_loop)
    return slice_loop


def _over(sch: Any, loop: Any, bound: list[Any], reduction: list[Any]) -> bool:
    """Whether a loop drives the rank reduction; a unit loop that nothing uses does not."""
    variable = sch.get(loop).loop_var
    users = [var for var, value in bound if binds(variable, value)]
    return bool(users) and all(any(user.same_as(each) for each in reduction) for user in users)


def _exchange_output(sch: Any, block: Any, tile_loop: Any, subject: _Subject, ranks: Any) -> None:
    """Let every CTA combine the whole tile and store its own slice of it."""
    store = sch.cache_write(block, 0, "shared")
    if tile_loop is not None:
        sch.reverse_compute_at(store, tile_loop, preserve_unit_loops=True)
    slice_loop = _slice(sch, store, subject.depth, ranks)
    _declare_whole_tile(sch, store, block, slice_loop, subject)
    sch.compute_at(block, slice_loop, preserve_unit_loops=True)


def _exchange_intermediate(sch: Any, partial: Any, block: Any, subject: _Subject) -> None:
    """Let every CTA combine the whole tile where its consumer runs."""
    consumer, nest = _consumer_nest(sch, block)
    sch.set_scope(block, 0, "shared")
    _declare_whole_tile(sch, consumer, block, nest, subject)
    sch.compute_at(block, nest, preserve_unit_loops=True)
    loops, depth = position(sch, RULE, consumer, nest)
    if depth:
        sch.compute_at(partial, loops[depth - 1], preserve_unit_loops=True)
    rank = bindings(sch, partial)[0][1]
    cluster_bind(
        sch, next(each for each in sch.get_loops(partial) if binds(sch.get(each).loop_var, rank))
    )


def _declare_whole_tile(sch: Any, consumer: Any, block: Any, nest: Any, subject: _Subject) -> None:
    """Let `consumer`, of which each CTA runs a slice, read the whole tile.

    ``compute_at`` recomputes what the consumer reads; it would else combine just the slice.
    """
    buffer = sch.get(block).writes[0].source
    bound = bindings(sch, consumer)
    if not any(binds(sch.get(nest).loop_var, value) for _, value in bound):
        return
    reads = list(sch.get(consumer).reads)
    index = next(i for i, each in enumerate(reads) if each.source.same_as(buffer))
    axes = [
        next((i for i, (var, _) in enumerate(bound) if var.var.same_as(extent.min)), None)
        for extent in reads[index].region
    ]
    if None in axes:
        return

    def whole_tile(*iterators: Any) -> list[tuple[Any, Any]]:
        starts = [
            iterators[axis] // extent * extent
            for axis, extent in zip(axes, subject.tile, strict=True)
        ]
        return [(start, start + n) for start, n in zip(starts, subject.tile, strict=True)]

    sch.annotate_buffer_access(consumer, index, "read", whole_tile)


def _check_exchange(sch: Any, block: Any, loop: Any, subject: _Subject) -> None:
    ranks = constant_extent(sch, RULE, loop)
    if subject.output and subject.elements % ranks:
        raise refuse(
            ScheduleRefused,
            RULE,
            subject.where,
            found=f"{subject.elements} elements for {ranks} CTAs",
            limit="with scatter=False, a tile that divides into one slice a CTA",
            instead="choose a tile whose element count the cluster size divides, or scatter=True",
        )
    if not subject.output and _consumer_nest(sch, block) is None:
        raise refuse(
            ScheduleRefused,
            RULE,
            subject.where,
            found="no consumer in a cluster-bound loop",
            limit="all-exchange leaves the tile with the CTAs that consume it",
            instead="cluster_bind a loop of the consumer first, or use scatter=True",
        )


def _consumer_nest(sch: Any, block: Any) -> Any:
    """A consumer of `block` and its outermost cluster-bound loop, or None."""
    for consumer in sch.get_consumers(block):
        for loop in sch.get_loops(consumer):
            if cluster_axis(sch.get(loop)) is not None:
                return consumer, loop
    return None
