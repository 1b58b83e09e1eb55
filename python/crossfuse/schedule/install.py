"""Puts the primitives on `tvm.s_tir.Schedule`, as methods beside TVM's own."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.schedule.cluster_bind import cluster_bind
from crossfuse.schedule.dsm_reduce import dsm_reduce
from crossfuse.schedule.dsm_shuffle import dsm_shuffle

PRIMITIVES = (cluster_bind, dsm_reduce, dsm_shuffle)


def install() -> None:
    """Install every primitive; calling it again changes nothing.

    A subclass of ``Schedule`` would lose its class across TVM's FFI (``sch.copy()`` returns the
    plain one), so the methods are set on the class itself.
    """
    for primitive in PRIMITIVES:
        setattr(ir.Schedule, primitive.__name__, primitive)
