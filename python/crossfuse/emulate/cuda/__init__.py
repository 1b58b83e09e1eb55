"""Emulation of generated CUDA on the CPU, thread-block clusters included."""

from __future__ import annotations

from crossfuse.emulate.cuda.chain import Link, chain
from crossfuse.emulate.cuda.faults import (
    change_argument,
    drop_call,
    early_exit,
    recycle_slab,
    remove_cluster_barrier,
    wrong_rank,
)
from crossfuse.emulate.cuda.ranks import emulate_ranks
from crossfuse.emulate.cuda.run import EmulationReport, Finding, emulate

__all__ = [
    "EmulationReport",
    "Finding",
    "Link",
    "chain",
    "change_argument",
    "drop_call",
    "early_exit",
    "emulate",
    "emulate_ranks",
    "recycle_slab",
    "remove_cluster_barrier",
    "wrong_rank",
]
