"""`grid_stage`: an intermediate stays in L2 while the CTAs of one kernel go on to load it."""

from __future__ import annotations

from typing import Any

from crossfuse.blocks.scheduled import function, name_of
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import GRID_STAGE
from crossfuse.schedule.primitive import check_block

RULE = "grid_stage"


@checked
def grid_stage(sch: AnySchedule, block: Any) -> None:
    """Keep what a block stores in L2 for later nests of the same kernel.

    A phase is a nest over the grid in such a kernel. There may be any number of them, each with
    tiles, a division of its cluster and an epilogue of its own; all have the same rows of tiles and
    clusters of one shape. Before, three nests, which are three kernels::

        for t in thread_binding(29, "blockIdx.x"):      # kernel 0
            hidden[tile t] = ... a[rows of t]
        for t in thread_binding(16, "blockIdx.x"):      # kernel 1
            more[tile t] = ... hidden[rows of t]
        for t in thread_binding(29, "blockIdx.x"):      # kernel 2
            out[tile t] = ... more[rows of t]

    After ``sch.grid_stage(block)`` of the blocks that store ``hidden`` and ``more``, one persistent
    kernel of as many CTAs as the widest phase has tiles, or find room::

        for t in thread_binding(29, "blockIdx.x"):      # phase 0
            hidden[tile t] = ...                        # crossfuse.grid_stage = 1
            flag of hidden's tile t raised              # release, once the tile is stored
        for t in thread_binding(16, "blockIdx.x"):      # phase 1: its weights are loaded already
            flags of hidden's tiles in rows of t awaited    # acquire, in the order of columns
            more[tile t] = ...                          # crossfuse.grid_stage = 1
            flag of more's tile t raised
        for t in thread_binding(29, "blockIdx.x"):      # phase 2
            flags of more's tiles in rows of t awaited
            out[tile t] = ...

    A phase reads what any earlier one stores as the left operand of its products, which CTAs load
    as soon as the flags say so, while tiles of other rows are still made. No CTA waits for a phase
    that comes later in its own order, so there is no circle.

    The function is the same sequential program: flags are made by the lowering. All CTAs have to
    run at the same time; the launch is cooperative, and is refused where they do not fit.
    Recorded as ``annotate``, so a trace replays it in stock TVM.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule; as a method, ``sch.grid_stage(block)``.
    block : SBlockRV
        The block that stores an intermediate in global memory.

    Raises
    ------
    ScheduleRefused
        If the block stores an output, or an intermediate that is not in global memory.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm_chain:M=32,K=64,N=64,L=32,act=relu")))
    >>> sch.grid_stage(sch.get_sblock("hidden"))
    >>> dict(sch.get(sch.get_sblock("hidden")).annotations)
    {'crossfuse.grid_stage': 1}
    """
    check_block(sch, RULE, "block", block)
    where = name_of(sch, block)
    stored = [each.source for each in sch.get(block).writes]
    elsewhere = [each for each in stored if str(each.scope()) != "global"]
    if elsewhere:
        raise _refuse(where, f"'{elsewhere[0].name}' in scope {elsewhere[0].scope()}")
    # An output that another block loads too is stored anyway: only intermediates are staged.
    parameters = function(sch).params
    if any(each.same_as(other) for each in stored for other in parameters):
        raise _refuse(where, f"'{stored[0].name}', an output of the function")
    sch.annotate(block, GRID_STAGE, 1)


def _refuse(where: str, found: str) -> Exception:
    return refuse(
        ScheduleRefused,
        RULE,
        where,
        found=found,
        limit="an intermediate in global memory that a later nest loads",
        instead="call it for the block that stores the intermediate, before its scope is changed",
    )
