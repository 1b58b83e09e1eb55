"""`rank_bind`: binds the iterations of a parallel loop to the GPUs of a group."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import constant_extent, function, name_of
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import MAX_RANKS, RANK_BOUND, is_rank_bound
from crossfuse.schedule.primitive import check_loop, check_spatial, check_unbound, refusing

RULE = "rank_bind"


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
    check_loop(sch, RULE, "loop", loop)
    where = name_of(sch, loop)
    check_ranks(sch, RULE, where, loop)
    check_unbound(sch, RULE, where, loop)
    check_spatial(
        sch,
        RULE,
        where,
        loop,
        instead="for a reduction loop call rank_reduce, which makes partial sums in each GPU and "
        "adds them",
    )
    _check_outermost(sch, where, loop)
    with refusing(
        RULE,
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
            RULE,
            where,
            found=f"loop '{around.loop_var.name}' around it",
            limit="the outermost loop of its nest, which is a kernel in each GPU",
            instead="reorder the loop outside of all others",
        )
