"""Primitives over the GPUs of a group: `rank_bind`, `rank_reduce` and `rank_gather`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    bindings,
    binds,
    constant_extent,
    function,
    name_of,
    position,
    written_buffer,
)
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import Rule, ScheduleRefused, refuse
from crossfuse.markers import MAX_RANKS, PEER_SCOPE, RANK_BOUND, is_rank_bound
from crossfuse.schedule.primitive import (
    check_block,
    check_combiner,
    check_loop,
    check_reduction_loop,
    check_spatial,
    check_unbound,
    refusing,
    rehearsed,
)

_BIND = "rank_bind"


@checked
def rank_bind(sch: AnySchedule, loop: Any) -> None:
    """Bind a parallel loop to the GPUs of a group: iteration g runs in the GPU of rank g.

    Before, with ``g`` a parallel loop that is the outermost of its nest::

        for g in range(2):
            for i, j: C[g, i, j] = f(A[g, i, j])

    After ``sch.rank_bind(g)``::

        for g in parallel(2):                    # crossfuse.rank_bound = 1
            for i, j: C[g, i, j] = f(A[g, i, j]) # in GPU g, which has A[g] and C[g]

    Each nest is a kernel, with loops inside that are bound to its CTAs and threads; several nests
    may be bound, one behind the other. Nests that are not bound run in every GPU. Recorded as
    ``parallel`` and ``annotate``, so a trace replays it in stock TVM.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.rank_bind(loop)``.
    loop : LoopRV
        A data-parallel loop of constant extent, 1 to 8, with no loop around it.

    Raises
    ------
    ScheduleRefused
        If the extent is not 1 to 8 or differs from that of another such loop, or if the loop is not
        parallel, is bound already, or lies inside another loop.

    Notes
    -----
    Buffers in scope ``global.peer`` may be read at the index of another rank; every other buffer
    that has the rank as an index has it as its first one, and is used at the own rank alone. The
    lowering checks that.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> i, j, k = sch.get_loops(sch.get_sblock("gemm0"))
    >>> g, i1 = sch.split(i, [2, None])
    >>> sch.rank_bind(g)
    >>> dict(sch.get(g).annotations)
    {'crossfuse.rank_bound': 1}
    """
    check_loop(sch, _BIND, "loop", loop)
    where = name_of(sch, loop)
    check_ranks(sch, _BIND, where, loop)
    check_unbound(sch, _BIND, where, loop)
    check_spatial(
        sch,
        _BIND,
        where,
        loop,
        instead="for a reduction loop call rank_reduce, which makes partial sums in each GPU and "
        "adds them",
    )
    _check_outermost(sch, where, loop)
    with refusing(
        _BIND,
        where,
        limit="a data-parallel loop",
        instead="bind a loop whose iterations write different elements, and read none of them",
    ):
        sch.parallel(loop)
    sch.annotate(loop, RANK_BOUND, 1)


def check_ranks(sch: Any, rule: str, where: str, loop: Any) -> int:
    """Number of ranks of a loop over them; refused if no group has it, or not this function's."""
    extent = constant_extent(sch, rule, loop)
    if not 1 <= extent <= MAX_RANKS:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}",
            limit=f"1 to {MAX_RANKS} GPUs that share NVLink",
            instead="split the loop so that one part has at most that extent, and pass that part",
        )
    others = filter(is_rank_bound, ir.nodes(function(sch, loop).body, ir.For))
    other = next((each for each in others if ir.constant(each.extent) != extent), None)
    if other is not None:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}",
            limit=f"extent {other.extent}, as loop '{other.loop_var.name}' over the ranks has",
            instead="split both loops by the same number of GPUs",
        )
    return extent


def _check_outermost(sch: Any, where: str, loop: Any) -> None:
    around = sch.get_sref(loop).parent.stmt
    if isinstance(around, ir.For):
        raise refuse(
            ScheduleRefused,
            _BIND,
            where,
            found=f"loop '{around.loop_var.name}' around it",
            limit="the outermost loop of its nest, which is a kernel in each GPU",
            instead="reorder the loop outside of all others",
        )


# `rank_reduce`: splits a reduction over the GPUs of a group and adds the parts through NVLink.


_REDUCE = "rank_reduce"


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
    check_block(sch, _REDUCE, "block", block)
    check_loop(sch, _REDUCE, "loop", loop)

    def read(trial: Any) -> _Reduction:
        return _read_reduce(trial, block, loop, scatter)

    def change(target: Any, reduction: _Reduction) -> Any:
        return _split(target, block, reduction)

    return rehearsed(sch, read, change, lambda *_: None)


def _read_reduce(sch: Any, block: Any, loop: Any, scatter: bool) -> _Reduction:
    loops, rank = position(sch, _REDUCE, block, loop)
    where = f"{name_of(sch, block)}, {name_of(sch, loop)}"
    check_combiner(sch, _REDUCE, where, block)
    check_reduction_loop(sch, _REDUCE, where, block, loop, bind="rank_bind")
    check_unbound(sch, _REDUCE, where, loop)
    count = check_ranks(sch, _REDUCE, where, loop)
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
        _REDUCE,
        where,
        found=f"a result of shape ({', '.join(map(str, result.ty.shape))}), first index {index}",
        limit=f"with scatter=True, {count} slices along the first dimension, one loop over them",
        instead="write the result with the rank as its first dimension, or leave scatter out: then "
        "each GPU has all of it",
    )


def _split(sch: Any, block: Any, reduction: _Reduction) -> Any:
    """Make partial results in the slabs of the ranks, and combine them."""
    with refusing(
        _REDUCE,
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


# `rank_gather`: collects an operand from all GPUs of a group, through NVLink.


_GATHER = "rank_gather"

_refused = Rule(ScheduleRefused, _GATHER)


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
    check_block(sch, _GATHER, "block", block)

    def change(target: Any, maker: int | None) -> Any:
        return _fill(target, block, read_buffer_index, maker)

    def read(trial: Any) -> int | None:
        return _read_gather(trial, block, read_buffer_index)

    return rehearsed(sch, read, change, lambda *_: None)


def _read_gather(sch: Any, block: Any, index: int) -> int | None:
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
        _GATHER,
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
