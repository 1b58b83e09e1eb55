"""`dsm_shuffle`: leaves a producer's tile in the cluster and passes its slices through DSM."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import bindings, binds
from crossfuse.calls import AnySchedule, checked
from crossfuse.markers import DSM_SCOPE, DSM_SHUFFLE
from crossfuse.schedule.arguments import check_block, check_loop
from crossfuse.schedule.cluster_bind import cluster_bind
from crossfuse.schedule.rehearsal import refusing, rehearsed
from crossfuse.schedule.slices import Slices, read_slices
from crossfuse.schedule.tiles import check_slab

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
