"""`dsm_shuffle`: leaves a producer's tile in the cluster and passes its slices through DSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    analyzer,
    bindings,
    binds,
    constant_extent,
    function,
    in_loops,
    is_reduction,
    name_of,
    position,
    written_buffer,
)
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import DSM_SCOPE, DSM_SHUFFLE, MAX_CLUSTER, cluster_axis
from crossfuse.schedule.primitive import (
    check_block,
    check_dtype,
    check_loop,
    check_slab,
    cluster_bind,
    refusing,
    rehearsed,
    symbolic_extent,
)

# Analyses an intermediate for `dsm_shuffle`, and refuses those that it cannot slice.


@dataclass(frozen=True)
class Slices:
    """How an intermediate is cut into one slice for each CTA, read before anything is changed."""

    #: Producer, consumer and staging loop, as refusals name them.
    where: str
    #: Cluster axis whose CTAs own the slices.
    axis: str
    #: Slices, as the trace knows the number.
    count: Any
    #: Extent of the sliced dimension.
    columns: int
    #: Index of the dimension of the intermediate that is sliced.
    dimension: int
    #: Index of the iteration variable of the producer that walks over it.
    column: int
    #: Loops around the consumer's cluster-bound loop.
    cluster: int


def read_slices(
    sch: Any, rule: str, producer: Any, consumer: Any, index: int, at: Any, *, ring: bool
) -> Slices:
    """Analyse how a consumer reads an intermediate in slices.

    Refused is a consumer that does not take it slice by slice on the CTAs of a cluster, or a
    producer that does not write it column by column.
    """
    loops, depth = position(sch, rule, consumer, at)
    where = f"{name_of(sch, producer)} -> {name_of(sch, consumer)}, {name_of(sch, at)}"
    buffer = _intermediate(sch, rule, where, producer, consumer, index)
    cluster = _cluster_loop(sch, rule, where, loops, depth)
    step, dimension = _slice_loop(sch, rule, where, consumer, index, loops)
    _check_order(sch, rule, where, loops, (cluster, step, depth), ring)
    columns = ir.constant(buffer.ty.shape[dimension]) or 0
    count = _check_count(sch, rule, where, loops[step], loops[cluster], columns)
    _check_contiguous(sch, rule, where, consumer, (index, dimension), loops, step, columns // count)
    return Slices(
        where=where,
        axis=str(cluster_axis(sch.get(loops[cluster]))),
        count=symbolic_extent(sch, rule, loops[step]),
        columns=columns,
        dimension=dimension,
        column=_column(sch, rule, where, producer, dimension, placed=cluster > 0),
        cluster=cluster,
    )


def _intermediate(sch: Any, rule: str, where: str, producer: Any, consumer: Any, index: int) -> Any:
    """The buffer, read by this consumer only and by that index."""
    reads = sch.get(consumer).reads
    buffer = written_buffer(sch, producer)
    if not 0 <= index < len(reads) or not reads[index].source.same_as(buffer):
        names = ", ".join(f"{i}: '{region.source.name}'" for i, region in enumerate(reads))
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"read buffer index {index}",
            limit=f"the read of '{buffer.name}' among {names}",
            instead="pass the index of the producer's buffer in the consumer's reads",
        )
    others = [each for each in sch.get_consumers(producer) if not _same(sch, each, consumer)]
    kept = any(each.same_as(buffer) for each in function(sch, producer).params)
    if others or kept:
        reader = f"{name_of(sch, others[0])} reads it too" if others else "it is an output"
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"other uses of '{buffer.name}': {reader}",
            limit="an intermediate that lives in the cluster, for one consumer",
            instead="compute the other use from a copy of its own (cache_read, or reindex)",
        )
    check_dtype(rule, where, buffer)
    return buffer


def _same(sch: Any, one: Any, other: Any) -> bool:
    return bool(sch.get_sref(one).same_as(sch.get_sref(other)))


def _cluster_loop(sch: Any, rule: str, where: str, loops: list[Any], depth: int) -> int:
    """The innermost cluster-bound loop of the consumer, by position."""
    found = [i for i, each in enumerate(loops) if cluster_axis(sch.get(each)) is not None]
    if not found or found[-1] > depth:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found="no cluster-bound loop of the consumer outside the staging loop",
            limit="the consumer runs on the CTAs of a cluster",
            instead="split a loop over the consumer's output by the cluster size, reorder it "
            "outside the reduction and cluster_bind it",
        )
    return found[-1]


def _slice_loop(
    sch: Any, rule: str, where: str, consumer: Any, index: int, loops: list[Any]
) -> tuple[int, int]:
    """Position of the outermost reduction loop over the intermediate, and its dimension."""
    region = sch.get(consumer).reads[index]
    values = bindings(sch, consumer)
    for step, loop in enumerate(loops):
        variable = sch.get(loop).loop_var
        users = [each for each, value in values if binds(variable, value)]
        if not users or not all(is_reduction(each) for each in users):
            continue
        indices = [each.min for each in region.region]
        sliced = [n for n, each in enumerate(indices) if any(binds(u.var, each) for u in users)]
        if sliced:
            # A layout may count parts in front of the columns, and have only one.
            several = [n for n in sliced if ir.constant(region.source.ty.shape[n]) != 1]
            return step, (several or sliced)[0]
    raise refuse(
        ScheduleRefused,
        rule,
        where,
        found=f"no reduction loop over '{region.source.name}'",
        limit="a consumer that reduces over the columns of the intermediate",
        instead="use compute_at: an intermediate that is read element by element needs no exchange",
    )


def _check_order(
    sch: Any, rule: str, where: str, loops: list[Any], order: tuple[int, int, int], ring: bool
) -> None:
    cluster, step, depth = order
    name = sch.get(loops[step]).loop_var.name
    if step < cluster:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"slice loop '{name}' outside the cluster-bound loop",
            limit="every CTA walks over all slices",
            instead="reorder the cluster-bound loop outside the consumer's reduction",
        )
    if ring and depth < step:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"all slices staged at once, outside slice loop '{name}'",
            limit="a ring stages one slice, or a part of one, at a time",
            instead="pass ring=False for an all-gather, or stage at the slice loop or inside it",
        )


def _check_count(sch: Any, rule: str, where: str, step: Any, cluster: Any, columns: int) -> int:
    slices, ctas = constant_extent(sch, rule, step), constant_extent(sch, rule, cluster)
    if slices != ctas or columns % slices:
        divisors = [n for n in range(1, MAX_CLUSTER + 1) if columns % n == 0]
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"{slices} slices of {columns} columns for {ctas} CTAs",
            limit="one slice a CTA, all of one width",
            instead="split the consumer's reduction loop and its cluster-bound loop by the same "
            f"number, one of {', '.join(map(str, divisors))}",
        )
    return slices


def _check_contiguous(
    sch: Any,
    rule: str,
    where: str,
    consumer: Any,
    operand: tuple[int, int],
    loops: list[Any],
    step: int,
    width: int,
) -> None:
    """Refuse a slice loop whose iterations take other columns than those of one slab."""
    index, dimension = operand
    start = sch.get(consumer).reads[index].region[dimension].min
    column = in_loops(sch, consumer, start)
    known = analyzer([sch.get(each) for each in loops])
    variable = sch.get(loops[step]).loop_var
    if not known.can_prove_equal(ir.tirx.floordiv(column, width), variable):
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"slice loop '{variable.name}' over columns {column}",
            limit=f"{width} consecutive columns in each of its iterations",
            instead="split the consumer's reduction loop by [slices, None] and use the outer part",
        )


def _column(sch: Any, rule: str, where: str, producer: Any, dimension: int, *, placed: bool) -> int:
    """The index of the producer's iteration variable that walks over the columns.

    `placed` says that compute_at will make the producer's loops anew; otherwise they stay, and one
    of them must walk over all columns.
    """
    start = sch.get(producer).writes[0].region[dimension].min
    for index, (each, value) in enumerate(bindings(sch, producer)):
        if each.var.same_as(start) and (placed or isinstance(value, ir.Var)):
            return index
    raise refuse(
        ScheduleRefused,
        rule,
        where,
        found=f"a producer that writes column {start} in several loops",
        limit="one loop of the producer for the columns",
        instead="call dsm_shuffle before the producer's layout or loops are transformed",
    )


RULE = "dsm_shuffle"


@checked
def dsm_shuffle(
    sch: AnySchedule,
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

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm_chain:M=32,K=64,N=64,L=32,act=relu")))
    >>> hidden, second = sch.get_sblock("hidden"), sch.get_sblock("gemm1")
    >>> i, j, k = sch.get_loops(second)
    >>> c, j1 = sch.split(j, [4, None])
    >>> r, k1 = sch.split(k, [4, None])
    >>> sch.reorder(c, r, i, k1, j1)
    >>> sch.cluster_bind(c)
    >>> staged = sch.dsm_shuffle(hidden, second, 0, r)
    >>> [(each.name, each.count, each.shape) for each in sch.cluster_layout().buffers]
    [('hidden_shared.dsm', 4, (32, 16))]
    """
    check_block(sch, RULE, "producer", producer)
    check_block(sch, RULE, "consumer", consumer)
    check_loop(sch, RULE, "at", at)

    def read(trial: Any) -> Slices:
        operands = (producer, consumer, read_buffer_index)
        return read_slices(trial, RULE, *operands, at, ring=ring)

    def change(target: Any, slices: Slices) -> Any:
        with refusing(
            RULE,
            slices.where,
            limit="a producer that can be computed in front of the consumer's cluster nest",
            instead="call dsm_shuffle before the producer is moved, and place the producer's own "
            "producers afterwards",
        ):
            _lay_out(target, producer, slices)
            stage = _stage(target, consumer, read_buffer_index, at, ring)
            _place_producer(target, producer, consumer, slices)
        return stage

    def check(trial: Any, slices: Slices, _stage: Any) -> None:
        check_slab(trial, RULE, slices.where, producer, _rank_loop(trial, producer, slices))

    return rehearsed(sch, read, change, check)


def _lay_out(sch: Any, producer: Any, slices: Slices) -> None:
    """Make the rank the leading dimension of the intermediate, one slab for each CTA."""
    count, columns = slices.count, slices.columns
    # Divides exactly: `read_slices` refuses any other.
    width = columns // count if isinstance(count, int) else ir.tirx.floordiv(columns, count)

    def by_rank(*index: Any) -> list[Any]:
        others = [each for i, each in enumerate(index) if i != slices.dimension]
        column = index[slices.dimension]
        return [column // width, *others, column % width]

    sch.transform_layout(producer, ("write", 0), by_rank)
    sch.set_scope(producer, 0, DSM_SCOPE)


def _stage(sch: Any, consumer: Any, index: int, at: Any, ring: bool) -> Any:
    """Let the consumer copy the slices that it reads to its own shared memory."""
    stage = sch.cache_read(consumer, index, "shared.dyn", consumer_blocks=[consumer])
    sch.compute_at(stage, at, preserve_unit_loops=True)
    sch.annotate(stage, DSM_SHUFFLE, "ring" if ring else "all-gather")
    return stage


def _place_producer(sch: Any, producer: Any, consumer: Any, slices: Slices) -> None:
    """Compute the producer in front of the consumer's cluster nest, one slice in each CTA."""
    if slices.cluster:
        outer = sch.get_loops(consumer)[slices.cluster - 1]
        sch.compute_at(producer, outer, preserve_unit_loops=True)
    inner = list(sch.get_loops(producer))[slices.cluster :]
    column = next(each for each in inner if _walks_columns(sch, producer, each, slices))
    rank, element = sch.split(column, [slices.count, None])
    sch.reorder(rank, *[each for each in inner if each is not column], element)
    cluster_bind(sch, rank, slices.axis)


def _rank_loop(sch: Any, producer: Any, slices: Slices) -> Any:
    """The cluster-bound loop that `_place_producer` made: outermost of those over the columns."""
    loops = sch.get_loops(producer)
    return next(each for each in loops if _walks_columns(sch, producer, each, slices))


def _walks_columns(sch: Any, producer: Any, loop: Any, slices: Slices) -> bool:
    _, value = bindings(sch, producer)[slices.column]
    return binds(sch.get(loop).loop_var, value)
