"""`rank_gather`: collects an operand from all GPUs of a group, through NVLink."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import function, name_of
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.markers import PEER_SCOPE, is_rank_bound
from crossfuse.schedule.primitive import check_block, refusing, rehearsed
from crossfuse.schedule.rank_bind import rank_bind

RULE = "rank_gather"

_refused = Rule(ScheduleRefused, RULE)


@checked
def rank_gather(sch: AnySchedule, block: Any, read_buffer_index: int) -> Any:
    """Let a block of each GPU read an operand of which every GPU has a slab (all-gather).

    Before, with ``g`` bound to the GPUs::

        for g in rank(2):
            for r, i, j, k:  Y[g, r * 8 + i, j] += X[r, i, k] * W[g, k, j]

    After ``sch.rank_gather(Y, 0)``::

        for g in rank(2):
            for i, k:  P[g, i, k] = X[g, i, k]   # P: global.peer, slab g in GPU g
        for g in rank(2):
            for r, i, j, k:  Y[g, r * 8 + i, j] += P[r, i, k] * W[g, k, j]

    Where another block makes the operand, it makes it in peers' memory, and nothing is copied.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.rank_gather(block, read_buffer_index)``.
    block : SBlockRV
        The block that reads, in a nest whose outermost loop is bound by `rank_bind`.
    read_buffer_index : int
        Which of the block's reads it is: a buffer with the rank as its first dimension.

    Returns
    -------
    SBlockRV
        The block that fills the slabs, in a nest whose outermost loop is bound to the GPUs.

    Raises
    ------
    ScheduleRefused
        If the block is not in a loop over GPUs, has no such read, or the buffer has no slab for
        each of them, is not in global memory, or is made by a nest whose outermost loop is not over
        its first dimension. The schedule is then as it was.

    Notes
    -----
    Composed of ``cache_read`` or ``set_scope``, and `rank_bind`, all recorded.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=2,K=64,N=32")))
    >>> product = sch.get_sblock("gemm0")
    >>> i, j, k = sch.get_loops(product)
    >>> g, j1 = sch.split(j, [2, None])
    >>> sch.reorder(g, i, j1, k)
    >>> sch.rank_bind(g)
    >>> copy = sch.rank_gather(product, 0)
    >>> sch.get(copy).writes[0].source.scope()
    'global.peer'
    """
    check_block(sch, RULE, "block", block)

    def change(target: Any, maker: int | None) -> Any:
        return _fill(target, block, read_buffer_index, maker)

    def read(trial: Any) -> int | None:
        return _read(trial, block, read_buffer_index)

    return rehearsed(sch, read, change, lambda *_: None)


def _read(sch: Any, block: Any, index: int) -> int | None:
    """Position, among the block's producers, of that which makes the operand; None if none does."""
    where = name_of(sch, block)
    loops = sch.get_loops(block)
    if not loops or not is_rank_bound(sch.get(loops[0])):
        raise _refused(
            where,
            found="no loop over the GPUs around it",
            limit="a block in a nest whose outermost loop is bound to the GPUs",
            instead="call rank_bind for the loop over what each GPU makes",
        )
    reads = sch.get(block).reads
    if not 0 <= index < len(reads):
        names = ", ".join(f"{i}: '{each.source.name}'" for i, each in enumerate(reads))
        raise _refused(
            where,
            found=f"read buffer index {index}",
            limit=f"one of {names}",
            instead="pass the index of the operand in the block's reads",
        )
    buffer = reads[index].source
    count = ir.constant(sch.get(loops[0]).extent)
    shape = list(buffer.ty.shape)
    if not shape or ir.constant(shape[0]) != count or str(buffer.scope()) != "global":
        raise _refused(
            f"{where}, buffer '{buffer.name}'",
            found=f"shape ({', '.join(map(str, shape))}) in scope {buffer.scope()}",
            limit=f"{count} slabs in global memory, one for each GPU, along the first dimension",
            instead="give the operand the rank as its first dimension",
        )
    if any(each.same_as(buffer) for each in function(sch, block).params):
        return None
    producers = sch.get_producers(block)
    return next(
        place
        for place, each in enumerate(producers)
        if any(written.source.same_as(buffer) for written in sch.get(each).writes)
    )


def _fill(sch: Any, block: Any, index: int, maker: int | None) -> Any:
    """The block that fills the slabs, made or moved to peers' memory."""
    with refusing(
        RULE,
        name_of(sch, block),
        limit="an operand whose slabs one nest fills, with the rank as its outermost loop",
        instead="reorder the loop over the operand's first dimension outside of all others there",
    ):
        if maker is None:
            filled = sch.cache_read(block, index, PEER_SCOPE)
        else:
            filled = sch.get_producers(block)[maker]
            sch.set_scope(filled, 0, PEER_SCOPE)
        outermost = sch.get_loops(filled)[0]
        if not is_rank_bound(sch.get(outermost)):
            rank_bind(sch, outermost)
    return filled
