"""`accept_fewer_rows`: kernels that also run on fewer rows than the function has."""

from __future__ import annotations

from crossfuse.blocks.scheduled import function
from crossfuse.calls import AnySchedule, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import ROW_COUNTS, ROWS

RULE = "accept_fewer_rows"


@checked
def accept_fewer_rows(sch: AnySchedule) -> None:
    """Let the kernels of a function of M rows run on any m <= M rows.

    ::

        compiled for                    called with
        A    [512, K] ---+              A    [300, K]
        D    [L, N]   ---+-> kernel     D    [L, N]
        out  [512, L] <--+              out  [300, L]     300 rows are read, 300 are written

    Rows are the first extents of the left operand, or of what the kernel makes it of, of the output
    and of what an epilogue reads row by row; the lowering finds them. The function stays as it is:
    row i of its output follows from row i of its inputs, so m rows of it are what a function of m
    rows computes. The kernels go through all tiles as before; loads find zeros beyond the rows that
    there are, and nothing is stored there. Recorded as ``annotate`` of the root block, so a trace
    replays it in stock TVM.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        The schedule, before or after any other primitive; as a method, ``sch.accept_fewer_rows()``.

    Raises
    ------
    ScheduleRefused
        If it was called before. The lowering refuses functions of which rows depend on each other,
        and those that the Hopper pipeline does not lower.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=512,K=64,N=32")))
    >>> sch.accept_fewer_rows()
    >>> dict(sch.get(sch.get_sblock("root")).annotations)
    {'crossfuse.rows': 'at most'}
    """
    root = function(sch).body.block
    if ROWS in root.annotations:
        raise refuse(
            ScheduleRefused,
            RULE,
            f"block '{root.name_hint}'",
            found=f"{ROWS} = {root.annotations[ROWS]}",
            limit="one call for a function",
            instead="leave the second call out",
        )
    sch.annotate(sch.get_sblock("root"), ROWS, ROW_COUNTS[0])
