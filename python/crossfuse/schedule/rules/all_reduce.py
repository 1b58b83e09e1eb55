"""Rule for a sum over the GPUs of a group: each shows its tensor, then adds those of all."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import function
from crossfuse.calls import AnyFunction, AtLeastOne, checked
from crossfuse.schedule.rules.tiles import largest_divisor

#: Bytes that a thread loads at a time.
_LOAD = 16
#: Threads of a CTA, and parts of 16 bytes up to which they are taken, measured on two H200. Each of
#: the CTAs is counted in the memory of all peers, by an atomic operation on a word: there are few,
#: and multiprocessors are left to other kernels that wait for peers.
_THREADS = ((256, 1 << 12), (512, 1 << 15))
_MOST_THREADS = 1024


@checked
def schedule_all_reduce(func: AnyFunction, *, threads: AtLeastOne | None = None) -> Any:
    """Schedule a sum over GPUs, one shot: a kernel that fills slabs, then one that adds them.

    Each GPU reads the tensors of all others whole, which is the fastest for few elements: nothing
    is waited for but one barrier. The next call's first kernel has the other one.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        What `crossfuse.workload.all_reduce` makes.
    threads : int | None
        Threads of a CTA at most, as they divide the elements; each takes 16 bytes. By default 128
        where 64 CTAs are enough, else up to 512.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If a primitive does not fit the function.

    Examples
    --------
    >>> from crossfuse.workload import all_reduce
    >>> sch = schedule_all_reduce(all_reduce(elements=4096, ranks=2))
    >>> [each.scope() for each in sch.get(sch.get_sblock("root")).alloc_buffers]
    ['local', 'global.peer', 'local']
    """
    sch = ir.Schedule(func)
    total, result = sch.get_sblock("total"), sch.get_sblock("out")
    for block in (total, result):
        sch.rank_bind(sch.get_loops(block)[0])
    copy = sch.rank_gather(total, 0)
    given = function(sch).params[0].ty
    bits = int(ir.tvm.DataType(str(given.dtype)).bits)
    elements = int(given.shape[1])
    vector = largest_divisor(elements, _LOAD * 8 // bits)
    parts = elements // vector
    factors = [None, largest_divisor(parts, threads or _threads(parts)), vector]
    for block in (copy, result):
        cta, thread, element = sch.split(sch.get_loops(block)[1], factors)
        sch.bind(cta, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(element)
    sch.set_scope(total, 0, "local")
    sch.compute_at(total, thread, preserve_unit_loops=True)
    loads = sch.cache_read(total, 0, "local")
    *_, element, ranks = sch.get_loops(total)
    sch.reorder(ranks, element)
    sch.compute_at(loads, thread, preserve_unit_loops=True)
    # All loads are under way before the first sum: each takes as long as NVLink does.
    *_, ranks_of_loads, element_of_loads = sch.get_loops(loads)
    sch.unroll(ranks_of_loads)
    sch.vectorize(element_of_loads)
    for loop in (ranks, element):
        sch.unroll(loop)
    sch.decompose_reduction(total, ranks)
    return sch


def _threads(parts: int) -> int:
    """Threads of a CTA, for as many parts of 16 bytes."""
    return next((each for each, most in _THREADS if parts <= most), _MOST_THREADS)
