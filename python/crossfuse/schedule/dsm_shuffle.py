"""`dsm_shuffle`: a producer's tile stays in the cluster and its slices pass through DSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.schedule.cluster_bind import cluster_bind
from crossfuse.schedule.extents import symbolic_extent
from crossfuse.schedule.facts import (
    bindings,
    binds,
    constant_extent,
    is_reduction,
    name_of,
    position,
    reason,
)
from crossfuse.schedule.markers import DSM_DTYPES, DSM_SCOPE, DSM_SHUFFLE, cluster_axis

RULE = "dsm_shuffle"


def dsm_shuffle(
    sch: Any,
    producer: Any,
    consumer: Any,
    read_buffer_index: int,
    at: Any,
    *,
    ring: bool = True,
) -> Any:
    """Keep a producer's tile in the cluster and let the consumer stage it slice by slice.

    The consumer is a reduction over the producer's columns ``f``; its outer reduction loop ``r``
    has as many iterations as the cluster has CTAs, and a loop outside ``r`` is cluster-bound.
    Before, with a cluster of 4::

        for i, f:  H[i, f] = act(...)
        for i0:
            for z in cluster(4):                     # columns of Y
                for r in range(4):                   # <- at
                    for k, i1, j:  Y[i, j] += H[i, r * 32 + k] * D[r * 32 + k, j]

    After ``sch.dsm_shuffle(H, Y, 0, r)``::

        for i0:
            for c in cluster(4):                     # H: shared.dsm, slab c in CTA c
                for i1, k:  H[c, i, k] = act(...)    # CTA c makes slice c
            for z in cluster(4):
                for r in range(4):                   # ring: CTA z starts at slice z
                    for i1, k:  S[i, k] = H[(r + z) % 4, i, k]      # from the owner's slab
                    for k, i1, j:  Y[i, j] += S[i, k] * D[...]

    ``ring=True`` rotates the order so that at every step each slab is read by one CTA only; sums
    are then taken in an order that depends on the rank (and is the same in every run).
    ``ring=False`` takes the slices in rank order; with `at` outside the slice loop, all slices
    are staged at once (all-gather).

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.dsm_shuffle(producer, consumer, ...)``.
    producer : SBlockRV
        The block that writes the intermediate, not yet placed among other blocks' loops.
    consumer : SBlockRV
        The reduction block that reads it.
    read_buffer_index : int
        Which of the consumer's reads is the intermediate.
    at : LoopRV
        The consumer's loop in which slices are staged: the slice loop, or a loop inside it to
        stage parts of a slice.
    ring : bool
        Whether CTAs start at their own slice.

    Returns
    -------
    SBlockRV
        The staging block, which copies from the slabs to this CTA's shared memory.

    Raises
    ------
    ScheduleRefused
        If the consumer has no cluster-bound loop outside its slice loop, the slice loop's extent
        is not the cluster size, the columns do not divide into slices, the element type has no
        DSM access, or TVM cannot place the producer.

    Notes
    -----
    Composed of ``transform_layout``, ``set_scope``, ``cache_read``, ``compute_at``, ``split``,
    ``reorder``, `cluster_bind` and ``annotate``, all recorded. The lowering reads the ring from
    the annotation; run sequentially, the schedule takes the slices in rank order.
    """
    shape = _check(sch, producer, consumer, read_buffer_index, at)
    count, columns = shape.slices, shape.columns
    # An exact division: _check refused any other.
    width = columns // count if isinstance(count, int) else ir.tirx.floordiv(columns, count)

    def by_rank(*index: Any) -> list[Any]:
        others = [each for i, each in enumerate(index) if i != shape.dimension]
        column = index[shape.dimension]
        return [column // width, *others, column % width]

    try:
        sch.transform_layout(producer, ("write", 0), by_rank)
        sch.set_scope(producer, 0, DSM_SCOPE)
        stage = sch.cache_read(
            consumer, read_buffer_index, "shared.dyn", consumer_blocks=[consumer]
        )
        sch.compute_at(stage, at, preserve_unit_loops=True)
        sch.annotate(stage, DSM_SHUFFLE, "ring" if ring else "all-gather")
        _place_producer(sch, producer, shape)
    except ir.ScheduleError as error:
        raise refuse(
            ScheduleRefused,
            RULE,
            shape.where,
            found=reason(error),
            limit="a producer that can be computed in front of the consumer's cluster nest",
            instead="call dsm_shuffle before the producer is moved, and place the producer's own "
            "producers afterwards",
        ) from error
    return stage


@dataclass(frozen=True)
class _Shape:
    """What `dsm_shuffle` learned before changing anything."""

    where: str
    slices: Any
    columns: int
    dimension: int
    column: int
    outer: Any
    axis: str


def _check(sch: Any, producer: Any, consumer: Any, index: int, at: Any) -> _Shape:
    loops, depth = position(sch, RULE, consumer, at)
    where = f"{name_of(sch, producer)} -> {name_of(sch, consumer)}, {name_of(sch, at)}"
    buffer = _buffer(sch, producer, consumer, index, where)
    cluster = [i for i, each in enumerate(loops) if cluster_axis(sch.get(each)) is not None]
    if not cluster or cluster[-1] > depth:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found="no cluster-bound loop of the consumer outside the staging loop",
            limit="the consumer runs on the CTAs of a cluster",
            instead="split a loop over the consumer's output by the cluster size, reorder it "
            "outside the reduction and cluster_bind it",
        )
    outermost = cluster[0]
    axis = str(cluster_axis(sch.get(loops[cluster[-1]])))
    slice_loop, dimension = _slice_loop(sch, consumer, buffer, loops, where)
    slices = constant_extent(sch, RULE, slice_loop)
    ctas = constant_extent(sch, RULE, loops[cluster[-1]])
    columns = int(buffer.ty.shape[dimension])
    if slices != ctas or columns % slices:
        divisors = [n for n in range(1, 17) if columns % n == 0]
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"{slices} slices of {columns} columns for {ctas} CTAs",
            limit="one slice a CTA, all of one width",
            instead="split the consumer's reduction loop and its cluster-bound loop by the same "
            f"number, one of {', '.join(map(str, divisors))}",
        )
    outer = loops[outermost - 1] if outermost else None
    column = _column(sch, producer, dimension, where)
    slices_rv = symbolic_extent(sch, slice_loop)
    return _Shape(where, slices_rv, columns, dimension, column, outer, axis)


def _buffer(sch: Any, producer: Any, consumer: Any, index: int, where: str) -> Any:
    reads = sch.get(consumer).reads
    written = sch.get(producer).writes[0].source
    if not 0 <= index < len(reads) or not reads[index].source.same_as(written):
        names = ", ".join(f"{i}: '{region.source.name}'" for i, region in enumerate(reads))
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"read buffer index {index}",
            limit=f"the read of '{written.name}' among {names}",
            instead="pass the index of the producer's buffer in the consumer's reads",
        )
    dtype = str(written.ty.dtype)
    if dtype not in DSM_DTYPES:
        raise refuse(
            ScheduleRefused,
            RULE,
            where,
            found=f"element type {dtype}",
            limit=", ".join(DSM_DTYPES),
            instead="store the intermediate in one of these types",
        )
    return written


def _slice_loop(
    sch: Any, consumer: Any, buffer: Any, loops: list[Any], where: str
) -> tuple[Any, int]:
    """The outermost reduction loop that walks over the intermediate, and the dimension it walks."""
    node = sch.get(consumer)
    region = next(each for each in node.reads if each.source.same_as(buffer))
    for loop in loops:
        variable = sch.get(loop).loop_var
        users = [var for var, value in bindings(sch, consumer) if binds(variable, value)]
        if not users or not all(is_reduction(each) for each in users):
            continue
        for dimension, extent in enumerate(region.region):
            if any(binds(user.var, extent.min) for user in users):
                return loop, dimension
    raise refuse(
        ScheduleRefused,
        RULE,
        where,
        found=f"no reduction loop over '{buffer.name}'",
        limit="a consumer that reduces over the columns of the intermediate",
        instead="use compute_at: an intermediate that is read element by element needs no exchange",
    )


def _column(sch: Any, producer: Any, dimension: int, where: str) -> int:
    """Which iteration variable of the producer walks over the columns."""
    start = sch.get(producer).writes[0].region[dimension].min
    for index, (var, _) in enumerate(bindings(sch, producer)):
        if var.var.same_as(start):
            return index
    raise refuse(
        ScheduleRefused,
        RULE,
        where,
        found=f"a producer that writes column {start}",
        limit="one iteration variable of the producer for the columns",
        instead="call dsm_shuffle before the producer's layout or loops are transformed",
    )


def _place_producer(sch: Any, producer: Any, shape: _Shape) -> None:
    """Compute the producer in front of the consumer's cluster nest, one slice a CTA."""
    if shape.outer is not None:
        sch.compute_at(producer, shape.outer, preserve_unit_loops=True)
    loops = list(sch.get_loops(producer))
    depth = position(sch, RULE, producer, shape.outer)[1] + 1 if shape.outer is not None else 0
    inner = loops[depth:]
    value = bindings(sch, producer)[shape.column][1]
    column = next(each for each in inner if binds(sch.get(each).loop_var, value))
    rank, element = sch.split(column, [shape.slices, None])
    first = [each for each in inner if each is not column]
    sch.reorder(rank, *first, element)
    cluster_bind(sch, rank, shape.axis)
