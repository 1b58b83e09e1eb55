"""`rank_reduce`: splits a reduction over the GPUs of a group and adds the parts through NVLink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import bindings, binds, name_of, position, written_buffer
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import PEER_SCOPE
from crossfuse.schedule.primitive import (
    check_block,
    check_combiner,
    check_loop,
    check_reduction_loop,
    check_unbound,
    refusing,
    rehearsed,
)
from crossfuse.schedule.rank_bind import check_ranks, rank_bind

RULE = "rank_reduce"


@dataclass(frozen=True)
class _Reduction:
    """What is known before anything is changed."""

    #: Block and loop, as refusals name them.
    where: str
    #: Position of the loop over ranks among the block's.
    rank: int
    #: Position of the loop over slices of the result; None if every rank has all of it.
    slices: int | None


@checked
def rank_reduce(sch: AnySchedule, block: Any, loop: Any, *, scatter: bool = False) -> Any:
    """Split a reduction over the GPUs of a group and combine the partial results through NVLink.

    Before, with ``g`` a reduction loop of extent 2, the number of GPUs::

        for i, j, g, k:  C[i, j] += A[g, i, k] * B[g, k, j]

    After ``sch.rank_reduce(C, g)``, each GPU has the whole result (all-reduce)::

        for g in rank(2):                        # P: global.peer, slab g in GPU g
            for i, j, k:  P[g, i, j] += A[g, i, k] * B[g, k, j]
        for i, j:                                # in every GPU, of a copy of its own
            for g in range(2):  C[i, j] += P[g, i, j]

    With ``scatter=True`` the first dimension of the result is the rank of the GPU that has it
    (reduce-scatter)::

        for g in rank(2):
            for z, i, j, k:  P[g, z, i, j] += A[g, z * 8 + i, k] * B[g, k, j]
        for z in rank(2):                        # GPU z combines slice z
            for i, j:
                for g in range(2):  C[z, i, j] += P[g, z, i, j]

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.rank_reduce(block, loop)``.
    block : SBlockRV
        A reduction by sum, product, max or min, not yet decomposed, alone in its loops. Afterwards
        it combines.
    loop : LoopRV
        A serial reduction loop of the block, extent 1 to 8: one iteration for each GPU.
    scatter : bool
        False: each GPU ends with all of the result. True: with its slice.

    Returns
    -------
    SBlockRV
        The block of the partial results. Its loop over ranks is bound and the outermost one; all
        others are serial, to be bound to CTAs and threads. Take them from ``sch.get_loops``: random
        variables of the block's former loops have ended.

    Raises
    ------
    ScheduleRefused
        If the loop is no reduction loop of the block or has the wrong extent, if the reduction
        cannot be split, or, with ``scatter=True``, if the first dimension of the result is not one
        loop over the ranks. The schedule is then as it was.

    Notes
    -----
    Composed of ``reorder``, ``rfactor``, ``set_scope`` and `rank_bind`, all recorded. Partial
    results are combined in the order of ranks, so all GPUs have the same bits in every run.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> product = sch.get_sblock("gemm0")
    >>> i, j, k = sch.get_loops(product)
    >>> g, k1 = sch.split(k, [2, None])
    >>> partial = sch.rank_reduce(product, g)
    >>> buffer = sch.get(partial).writes[0].source
    >>> buffer.scope(), [int(each) for each in buffer.ty.shape]
    ('global.peer', [2, 32, 32])
    """
    check_block(sch, RULE, "block", block)
    check_loop(sch, RULE, "loop", loop)

    def read(trial: Any) -> _Reduction:
        return _read(trial, block, loop, scatter)

    def change(target: Any, reduction: _Reduction) -> Any:
        return _split(target, block, reduction)

    return rehearsed(sch, read, change, lambda *_: None)


def _read(sch: Any, block: Any, loop: Any, scatter: bool) -> _Reduction:
    loops, rank = position(sch, RULE, block, loop)
    where = f"{name_of(sch, block)}, {name_of(sch, loop)}"
    check_combiner(sch, RULE, where, block)
    check_reduction_loop(sch, RULE, where, block, loop, bind="rank_bind")
    check_unbound(sch, RULE, where, loop)
    count = check_ranks(sch, RULE, where, loop)
    slices = _slices(sch, where, block, loops, count) if scatter else None
    return _Reduction(where, rank, slices)


def _slices(sch: Any, where: str, block: Any, loops: list[Any], count: int) -> int:
    """Position of the loop that is the first index of the result, one iteration for each rank."""
    result = written_buffer(sch, block)
    first = sch.get(block).writes[0].region[0].min
    values = {each.var: value for each, value in bindings(sch, block)}
    index = ir.substitute(first, values)
    for place, each in enumerate(loops):
        node = sch.get(each)
        whole = ir.constant(node.extent) == count == ir.constant(result.ty.shape[0])
        if whole and binds(node.loop_var, index) and node.loop_var.same_as(index):
            return place
    raise refuse(
        ScheduleRefused,
        RULE,
        where,
        found=f"a result of shape ({', '.join(map(str, result.ty.shape))}), first index {index}",
        limit=f"with scatter=True, {count} slices along the first dimension, one loop over them",
        instead="write the result with the rank as its first dimension, or leave scatter out: then "
        "each GPU has all of it",
    )


def _split(sch: Any, block: Any, reduction: _Reduction) -> Any:
    """Make partial results in the slabs of the ranks, and combine them."""
    with refusing(
        RULE,
        reduction.where,
        limit="a complete reduction block alone in its loops",
        instead="call rank_reduce before decompose_reduction and before other blocks are moved "
        "into the loops of this one",
    ):
        loops = list(sch.get_loops(block))
        rank = loops.pop(reduction.rank)
        sch.reorder(rank, *loops)
        partial = sch.rfactor(rank, 0)
        sch.set_scope(partial, 0, PEER_SCOPE)
        rank_bind(sch, sch.get_loops(partial)[0])
        # What is left of the block has the loops of the result behind that over ranks.
        rank, *outer = sch.get_loops(block)
        sch.reorder(*outer, rank)
        if reduction.slices is not None:
            slices = outer.pop(_behind(reduction))
            sch.reorder(slices, *outer, rank)
            rank_bind(sch, slices)
    return partial


def _behind(reduction: _Reduction) -> int:
    """Position of the loop over slices among the others, without that over ranks."""
    assert reduction.slices is not None
    return reduction.slices - int(reduction.slices > reduction.rank)
